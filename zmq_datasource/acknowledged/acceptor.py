"""The receiving side's link: the ROUTER around the state machine ``reception``.

A sender has one data message on the way, so libzmq's queues stay short. They are always emptied, because libzmq also
keeps the messages of a connection that has ended. While the log is full or its disk refuses, only commits wait.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import zmq

from zmq_datasource.acknowledged.attempt_files import AttemptFiles
from zmq_datasource.acknowledged.protocol import MOST_FRAME_BYTES, MOST_FRAMES, encode
from zmq_datasource.acknowledged.reception import Reception, Terms
from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.log import FillerFacts, LogWriter
from zmq_datasource.transport.authentication import NameRights
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.peers import count_connections
from zmq_datasource.transport.spec import SocketSpec, frame_limit
from zmq_datasource.transport.unfinished import Unfinished

__all__ = ["Acceptor", "Terms"]

WAIT_MS = 10
ROUND_MESSAGES = 256
# libzmq bounds messages and not bytes, and a frame may have 64 MiB.
_RCVHWM = 2
# The topic and value of the largest row, and their offsets.
_MOST_MESSAGE_BYTES = 2 * MOST_FRAME_BYTES + (4 << 20)
_HOUSEKEEPING_SECONDS = 0.1


class Acceptor:
    """Fills a log with transactions; use it in a ``with`` block, in one thread.

    Args:
        spec: A ROUTER.
        terms: The limits for senders.
        counters: Counts what is received.
        files: Where attempts are staged.
        transactions: Which transactions are committed; restored before the block.
        log: Where transactions are committed; open before the block.

    Attributes:
        reception: The state machine.
    """

    drain_seconds = 1.0

    def __init__(
        self,
        spec: SocketSpec,
        terms: Terms,
        counters: SourceCounters,
        files: AttemptFiles,
        transactions: CommittedTransactions,
        log: LogWriter,
    ) -> None:
        self._spec = spec
        self._counters = counters
        self._log = log
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="zmq-staging")
        self.reception = Reception(terms, transactions, counters, files, log, self._pool)
        self._next_housekeeping = 0.0

    def __enter__(self) -> Self:
        """Open the socket, and find the staged attempts.

        Raises:
            OptionError, EndpointError: The socket cannot be opened with these options.
            LogError: The files of attempts cannot be read or deleted.
        """
        self.reception.recover(time.monotonic())
        self._open = OpenSocket(self._spec, self._prepare)
        self._socket = self._open.socket
        self._rights = NameRights(self._spec.allowed_clients)
        self._unfinished = Unfinished(self._open, _MOST_MESSAGE_BYTES)
        self._counters.rcvhwm = int(self._socket.getsockopt(zmq.RCVHWM))
        return self

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sock.setsockopt(zmq.MAXMSGSIZE, frame_limit(MOST_FRAME_BYTES))
        sock.setsockopt(zmq.RCVHWM, min(self._spec.rcvhwm or _RCVHWM, _RCVHWM))

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._open.close(linger=0)

    def wake(self) -> None:
        """Do nothing: ``receive`` never waits for long."""

    def receive(self, gather: float = 0.0) -> int:
        """Wait up to ``WAIT_MS`` for a message, obey the messages that have come, and answer.

        Args:
            gather: Has no effect: a transaction is answered as soon as it is durable.

        Returns:
            The number of messages that were obeyed.
        """
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
            self._watch_connections()
            self.reception.check_timeouts(now)
        self._answer()
        # Wait only 1 ms while another thread will be done soon.
        if not self._has_message and not self._socket.poll(1 if self.reception.busy else WAIT_MS):
            return 0
        taken = 0
        while taken < ROUND_MESSAGES and self._has_message:
            sender, *parts = self._unfinished.receive(1 + MOST_FRAMES)
            may_use = self._rights.of((parts or [sender])[-1])
            self.reception.receive(sender.bytes, [part.bytes for part in parts], time.monotonic(), may_use)
            self._answer()
            taken += 1
        return taken

    @property
    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _watch_connections(self) -> None:
        self._open.watch.update()
        self._unfinished.check_connections()
        count_connections(self._counters, [self._open.watch])

    def _answer(self) -> None:
        """Go on with what other threads have done, and send the answers.

        Raises:
            LogError: The log has failed.
        """
        self.reception.go_on(time.monotonic())
        while self.reception.answers:
            peer, message = self.reception.answers.popleft()
            try:
                self._socket.send_multipart([peer, *encode(message)], zmq.NOBLOCK)
            except zmq.ZMQError as e:
                # The sender has gone or does not read. It will ask again.
                if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise

    def extend_timeouts(self) -> None:
        """Go on to receive: the state machine knows that the log takes no commits now."""
        self.receive()

    def finish(self, seconds: float) -> None:
        """Wait up to ``seconds`` for rows that are being written, and answer their senders. Called once, at the end."""
        deadline = time.monotonic() + seconds
        while self.reception.busy and time.monotonic() < deadline:
            self._answer()
            time.sleep(WAIT_MS / 1000)

    def cut(self) -> Future[int]:
        """Cut the log's chunk, which has the committed transactions already."""
        return self._log.cut()

    def facts(self) -> FillerFacts:
        """Return no figures: no row waits in memory. Rows are in files, and appended when they are committed."""
        return FillerFacts()
