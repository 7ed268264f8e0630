"""The thread that serves durable subscribers: it does what ``server`` decides.

The rules:

* The thread ``zmq-durable`` uses the socket, and reads rows in turns of some milliseconds. Eight threads more read and
  write leases, and search the log in steps. So neither a disk that stalls nor a long search holds up others, and the
  positions of many names reach the disk together.
* An answer takes memory until libzmq has handed it to the system. A name has at most two such answers, on two
  connections, because a client that has lost its connection gets its answer on the new one. The answers of all clients
  share ``_MOST_BYTES``, and beyond that each may have ``_LEAST_BYTES``, or one message. So memory is bounded, however
  slowly clients read.
* Requests are read as far as there is time. The rest waits in libzmq and in the kernel.
* All threads end with the process. The end of serving waits for the disk for some seconds only.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Self

import zmq

from zmq_datasource.host import failpoints
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.host.wake_pipe import WakePipe
from zmq_datasource.log import LeaseFiles, LogStorage, LogWriter, read_head
from zmq_datasource.serving.protocol import MOST_FRAMES, PackedRows, encode, pack_rows
from zmq_datasource.serving.reading import LogRows
from zmq_datasource.serving.server import AwaitRows, Do, Read, Reply, Server
from zmq_datasource.transport.answers import Answers, set_router_options
from zmq_datasource.transport.authentication import NameRights
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec
from zmq_datasource.transport.unfinished import Unfinished

# libzmq bounds the number of messages and not their bytes, so it must queue few requests. A client that waits for each
# answer needs room for one.
_RCVHWM, _SNDHWM = 16, 8
# The largest message of an honest client. One with more frames is cut behind the first frame too many, so that the
# protocol refuses it.
_MOST_REQUEST_BYTES = 64 << 10
# Bytes of the answers of all clients that libzmq has not handed to the system, and what each client may have beyond
# that.
_MOST_BYTES, _LEAST_BYTES = 128 << 20, 128 << 10
# About how many bytes one answer has, beside its last message.
_MOST_BATCH_BYTES = 4 << 20
# How long requests are read before answers are sent.
_TURN_SECONDS = 0.005
# How long there may be nothing to do; how soon to check again whether an answer has left (no event says so).
_WAIT_MS, _RECHECK_MS = 100, 10
_HOUSEKEEPING_SECONDS = 0.1
_DISK_THREADS = 8
# How long the end waits for calls of the disk.
_END_SECONDS = 10.0


class DurableServer:
    """Serves durable subscribers of a log that this process writes; in a ``with`` block.

    Args:
        spec: A ROUTER.
        storage: The log.
        contents: Its writer, which is open.
        await_rows: ``ReceiveLoop.await_rows``.
        expiry: Seconds after which a subscriber that is away is forgotten.
    """

    def __init__(
        self,
        spec: SocketSpec,
        storage: LogStorage,
        contents: LogWriter,
        await_rows: Callable[[int], None],
        expiry: float,
    ) -> None:
        self._spec, self._storage, self._contents = spec, storage, contents
        self._await_rows = await_rows
        self._rows = LogRows(storage, contents)
        self._files = LeaseFiles(storage)
        self._server = Server(contents.log_id, expiry)
        self._rights = NameRights(spec.allowed_clients)
        self._reads: dict[str, Read] = {}
        self._jobs: queue.SimpleQueue[Do | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._next_housekeeping = 0.0
        self._used_bytes = 0
        self._stopping = False
        self._failure: Exception | None = None
        self._faults = LimitedLog(__name__, "faults of durable subscribers")
        self._threads = [threading.Thread(target=self._run, name="zmq-durable", daemon=True)]
        for _ in range(_DISK_THREADS):
            self._threads.append(
                threading.Thread(target=self._use_disk, name="zmq-durable-disk", daemon=True)
            )

    def __enter__(self) -> Self:
        """Bind the socket, and start to serve.

        Raises:
            OptionError, EndpointError: The socket cannot be opened.
        """
        with ExitStack() as stack:
            self._opened = OpenSocket(self._spec, _prepare)
            stack.callback(self._opened.close, linger=0)
            self._wakes = WakePipe()
            stack.callback(self._wakes.close)
            self._unfinished = Unfinished(self._opened, _MOST_REQUEST_BYTES)
            self._answers = Answers(self._opened.socket)
            self._poller = zmq.Poller()
            self._poller.register(self._opened.socket, zmq.POLLIN)
            self._poller.register(self._wakes.descriptor, zmq.POLLIN)
            self._stack = stack.pop_all()
        self._contents.on_sealed = self._wakes.wake
        self._server.wake(self._contents.leases, time.monotonic())
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the socket. A client sends the position that is not written yet to the next server."""
        self._stopping = True
        self._wakes.wake()
        self._contents.on_sealed = lambda: None
        for _thread in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._faults.warn("the end of serving durable subscribers: the disk does not answer")
        if not self._threads[0].is_alive():  # otherwise it uses the socket
            self._stack.close()

    @property
    def accounts(self) -> list[dict[str, Any]]:
        """The figures of each subscriber. Any thread may ask."""
        return list(self._server.accounts(time.monotonic()))

    def check(self) -> None:
        """Raise the error that has ended serving, if there is one."""
        if self._failure is not None:
            raise self._failure

    # The threads.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
        except Exception as e:
            self._faults.fault("serving durable subscribers has ended: %r", e, error=e)
            self._failure = e

    def _use_disk(self) -> None:
        while (job := self._jobs.get()) is not None:
            result: Any
            try:
                result = self._operate(*job.operation)
            except Exception as e:
                result = e
            self._results.put((job.name, result))
            self._wakes.wake()

    def _operate(self, verb: str, *arguments: Any) -> int | None:
        """Do what a job of the server needs of the disk. Called in several threads."""
        if verb == "find newest":
            return self._rows.find_newest(*arguments)
        (lease,) = arguments
        if verb == "begin":
            self._files.read(lease.key)  # one that is damaged must be restored or dropped
        self._files.write(lease)
        return read_head(self._storage.store).announced if verb == "begin" else None

    def _round(self) -> None:
        """Wait until there is something to do, and do it."""
        self._poller.poll(self._wait_ms())
        self._wakes.clear()
        self._follow()
        self._take_results()
        self._take_requests()
        self._keep_house()
        self._act()
        self._used_bytes = self._answers.bytes if self._reads else 0
        for read in list(self._reads.values()):
            if not self._must_wait(read):
                del self._reads[read.name]
                self._read(read)
                self._act()

    def _wait_ms(self) -> int:
        if not self._reads:
            return _WAIT_MS
        return _RECHECK_MS if all(map(self._must_wait, self._reads.values())) else 0

    def _must_wait(self, read: Read) -> bool:
        """Whether answers of this name are still on their way."""
        on_the_way = self._answers.connections_of(read.name)
        return read.waiting.peer in on_the_way or len(on_the_way) > 1

    def _follow(self) -> None:
        self._server.grew(self._contents.earliest, self._contents.durable_end, time.monotonic())

    def _take_results(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._server.done(*self._results.get_nowait(), time.monotonic())

    def _take_requests(self) -> None:
        deadline = time.monotonic() + _TURN_SECONDS
        with suppress(zmq.Again):
            while (now := time.monotonic()) < deadline:
                # libzmq puts the peer's routing id in front.
                peer, *frames = self._unfinished.receive(1 + MOST_FRAMES)
                rights = self._rights.of((frames or [peer])[-1])
                self._server.receive(peer.bytes, [frame.bytes for frame in frames], rights, now)

    def _keep_house(self) -> None:
        now = time.monotonic()
        if now < self._next_housekeeping:
            return
        self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        self._opened.watch.update()
        self._unfinished.check_connections()
        self._server.wake(self._contents.leases, now)
        self._rows.close_files()

    def _act(self) -> None:
        """Do what the server has decided."""
        for action in self._server.take():
            match action:
                case Reply():
                    self._reply(action)
                case Read():
                    self._reads[action.name] = action
                case Do():
                    self._jobs.put(action)
                case AwaitRows(end):
                    self._await_rows(end)

    def _read(self, read: Read) -> None:
        room = min(
            read.waiting.fetch.max_bytes, _MOST_BATCH_BYTES, max(_LEAST_BYTES, _MOST_BYTES - self._used_bytes)
        )
        found: PackedRows | Exception | None = None
        next_id = read.waiting.at
        try:
            batch, next_id = self._rows.read(read, room)
            if batch is not None:
                found = pack_rows(batch)
                self._used_bytes += batch.nbytes
        except Exception as e:
            self._follow()  # the rows may be deleted by now
            found = e
        self._server.read(read, found, next_id, time.monotonic())

    def _reply(self, reply: Reply) -> None:
        """Send an answer. If the client is gone, or its queue has no room, it asks again."""
        failpoints.reach("serving.batch.before_send")
        try:
            self._answers.send(reply.peer, encode(reply.message, reply.buffers), reply.name)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise


def _prepare(sock: zmq.Socket[bytes]) -> None:
    set_router_options(sock, _RCVHWM, _SNDHWM, _MOST_REQUEST_BYTES)
    # A client that sets a routing id keeps it with a new connection, while the old one may still be there.
    sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
