"""The thread that serves durable subscribers: it does what ``server`` decides.

The rules:

* The thread ``zmq-durable`` uses the socket, and reads rows in turns of some milliseconds. Two more threads read and
  write leases, and search the log. So neither a disk that stalls nor a long search holds up others.
* An answer takes memory until libzmq has handed it to the system. A name has at most two such answers, on two
  connections, because a client that has lost its connection gets its answer on the new one. The answers of all clients
  share ``_MOST_BYTES``, and beyond that each may have ``_LEAST_BYTES``, or one message. So memory is bounded, however
  slowly clients read.
* Requests are read as far as there is time. The rest waits in libzmq and in the kernel.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Self

import pyarrow as pa
import zmq
from msgspec.structs import replace

from zmq_datasource.errors import LogError, LogFormatError, ZmqDataSourceError
from zmq_datasource.host import failpoints
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.host.wake_pipe import WakePipe
from zmq_datasource.log import (
    STORE_RETRY_SECONDS,
    Hold,
    Lease,
    LeaseFiles,
    LogStorage,
    LogWriter,
    Retrier,
    first_since,
    read_head,
    subscriber_key,
)
from zmq_datasource.serving.protocol import MOST_FRAMES, encode, pack_rows
from zmq_datasource.serving.reading import Cursor, newest_of_topics
from zmq_datasource.serving.server import (
    BOUNDS,
    AwaitRows,
    Bounds,
    Do,
    Operations,
    Read,
    Reply,
    Rows,
    Server,
)
from zmq_datasource.transport.answers import Answers, set_router_options
from zmq_datasource.transport.authentication import NameRights
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec
from zmq_datasource.transport.unfinished import Unfinished

# libzmq bounds the number of messages and not their bytes, so it must queue few requests. A client that waits for each
# answer needs room for one.
_RCVHWM, _SNDHWM = 16, 8
# The largest message of an honest client. A message with more bytes comes without frames, and one with more frames is
# cut behind the first frame too many, so that the protocol refuses it.
_MOST_REQUEST_BYTES = 64 << 10
# What a client may send beyond that without ending its message: hours of heartbeats.
_SPARE_BYTES = 1 << 20
# Bytes of the answers of all clients that libzmq has not handed to the system, and what each client may have beyond
# that.
_MOST_BYTES, _LEAST_BYTES = 128 << 20, 128 << 10
# About how many bytes one answer has, beside its last message.
_MOST_BATCH_BYTES = 4 << 20
# How long requests are read before answers are sent.
_TURN_SECONDS = 0.005
# How long there may be nothing to do; how soon to check again whether an answer has left (no event says so).
_WAIT_MS, _RECHECK_MS = 100, 10
_HOUSEKEEPING_SECONDS, _ACCOUNTS_SECONDS, _LISTING_SECONDS = 0.1, 0.25, 1.0
# A cursor has an open file, and rows that were read and not sent.
_MOST_CURSORS, _CURSOR_SECONDS = 64, 5.0
# How long to wait for a lock: the command line may hold it for a moment to see whether it is free.
_LOCK_SECONDS = 0.5
# How long the end waits for the last positions to be written.
_END_SECONDS = 5.0


class DurableServer:
    """Serves durable subscribers of a log that this process writes; in a ``with`` block.

    Args:
        spec: A ROUTER.
        storage: The log.
        contents: Its writer, which is open.
        await_rows: ``ReceiveLoop.await_rows``.
        expiry: Seconds after which a subscriber that is away is forgotten.
        bounds: How much subscribers may ask for.
        retry_seconds: How long the start waits for a disk that refuses.

    Attributes:
        accounts: The figures of each subscriber, at most a quarter of a second old.
    """

    accounts: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self,
        spec: SocketSpec,
        storage: LogStorage,
        contents: LogWriter,
        await_rows: Callable[[int], None],
        expiry: float,
        bounds: Bounds = BOUNDS,
        retry_seconds: float = STORE_RETRY_SECONDS,
    ) -> None:
        self._spec, self._contents, self._await_rows = spec, contents, await_rows
        self._retry_seconds = retry_seconds
        self._leases = _Leases(storage, contents, expiry)
        self._server = Server(contents.log_id, expiry, bounds)
        self._rights = NameRights(spec.allowed_clients)
        self._storage = storage
        self._reads: dict[str, Read] = {}
        self._cursors: dict[str, Cursor] = {}
        self._results: queue.SimpleQueue[tuple[str | None, Any]] = queue.SimpleQueue()
        self._next_housekeeping = self._next_accounts = self._next_listing = 0.0
        self._used_bytes = 0
        self._stopping = False
        self._failure: Exception | None = None
        self._faults = LimitedLog(__name__, "faults of durable subscribers")
        self._thread = threading.Thread(target=self._run, name="zmq-durable", daemon=True)

    def __enter__(self) -> Self:
        """Read all positions, bind the socket, and start to serve.

        Raises:
            LogError, OptionError, EndpointError: The log or the socket cannot be opened.
        """
        now = time.monotonic()
        for lease in Retrier(self._retry_seconds).retry(self._leases.read_all):
            self._server.restore(lease, now)
        with ExitStack() as stack:
            self._opened = OpenSocket(self._spec, _prepare)
            stack.callback(self._opened.close, linger=0)
            self._wakes = WakePipe()
            stack.callback(self._wakes.close)
            self._unfinished = Unfinished(self._opened, _MOST_REQUEST_BYTES)
            self._unfinished.spare_bytes, self._unfinished.check_seconds = _SPARE_BYTES, _HOUSEKEEPING_SECONDS
            self._answers = Answers(self._opened.socket)
            self._poller = zmq.Poller()
            self._poller.register(self._opened.socket, zmq.POLLIN)
            self._poller.register(self._wakes.descriptor, zmq.POLLIN)
            self._keeper = ThreadPoolExecutor(1, "zmq-durable-leases")
            self._searcher = ThreadPoolExecutor(1, "zmq-durable-search")
            stack.callback(self._leases.free_all)
            stack.callback(self._keeper.shutdown)
            stack.callback(self._searcher.shutdown, cancel_futures=True)
            self._stack = stack.pop_all()
        self._contents.on_sealed = self._wakes.wake
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the positions, and close the socket."""
        self._stopping = True
        self._wakes.wake()
        self._thread.join()
        self._contents.on_sealed = lambda: None
        self._stack.close()

    def check(self) -> None:
        """Raise the error that has ended serving, if there is one."""
        if self._failure is not None:
            raise self._failure

    # The thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
            self._server.close(time.monotonic())
            deadline = time.monotonic() + _END_SECONDS
            while self._act() or (self._server.is_busy and time.monotonic() < deadline):
                self._take_results(_HOUSEKEEPING_SECONDS)
        except Exception as e:
            self._faults.fault("serving durable subscribers has ended: %r", e, error=e)
            self._failure = e

    def _round(self) -> None:
        """Wait until there is something to do, and do it."""
        self._poller.poll(self._wait_ms())
        self._wakes.clear()
        self._follow()
        self._take_results()
        self._take_requests()
        self._server.wake(time.monotonic())
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
        return read.peer in on_the_way or len(on_the_way) > 1

    def _follow(self) -> None:
        self._server.grew(self._contents.earliest, self._contents.durable_end, time.monotonic())

    def _take_results(self, seconds: float = 0.0) -> None:
        """Give the server the results of operations, and wait up to ``seconds`` for one."""
        with suppress(queue.Empty):
            name, result = self._results.get(timeout=seconds) if seconds else self._results.get_nowait()
            while True:
                if name is not None:
                    self._server.done(name, result, time.monotonic())
                else:
                    self._next_listing = time.monotonic() + _LISTING_SECONDS
                    self._forget_dropped(result)
                name, result = self._results.get_nowait()

    def _forget_dropped(self, keys: set[str] | Exception) -> None:
        if isinstance(keys, Exception):
            self._faults.warn("listing the positions of durable subscribers: %s", keys)
        else:
            self._server.listed(keys, time.monotonic())

    def _take_requests(self) -> None:
        deadline = time.monotonic() + _TURN_SECONDS
        with suppress(zmq.Again):
            while (now := time.monotonic()) < deadline:
                # libzmq puts the peer's routing id in front.
                peer, *frames = self._unfinished.receive(1 + MOST_FRAMES)
                taken = (
                    [frame.bytes for frame in frames] if sum(map(len, frames)) <= _MOST_REQUEST_BYTES else []
                )
                self._server.receive(peer.bytes, taken, self._rights.of((frames or [peer])[-1]), now)

    def _keep_house(self) -> None:
        now = time.monotonic()
        if now < self._next_housekeeping:
            return
        self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        self._opened.watch.update()
        self._unfinished.check_connections()
        if now >= self._next_accounts:
            self._next_accounts = now + _ACCOUNTS_SECONDS
            self.accounts = list(self._server.accounts(now))
        if now >= self._next_listing:
            self._next_listing = math.inf  # until the disk has answered
            self._submit(self._keeper, None, self._leases.keys)
        # A deleted file needs room on the disk until it is closed.
        for name, cursor in list(self._cursors.items()):
            if len(self._cursors) > _MOST_CURSORS or now - cursor.used_at > _CURSOR_SECONDS:
                del self._cursors[name]

    def _act(self) -> bool:
        """Do what the server has decided; return whether there was anything."""
        actions = self._server.take()
        for action in actions:
            match action:
                case Reply():
                    self._reply(action)
                case Read():
                    self._reads[action.name] = action
                case Do(name, verb, arguments):
                    threads = self._searcher if verb in ("first_since", "newest") else self._keeper
                    self._submit(threads, name, partial(getattr(self._leases, verb), *arguments))
                case AwaitRows(end):
                    self._await_rows(end)
        return bool(actions)

    def _submit(self, threads: ThreadPoolExecutor, name: str | None, act: Callable[[], Any]) -> None:
        def act_and_tell() -> None:
            try:
                result = act()
            except Exception as e:
                result = e
            self._results.put((name, result))
            self._wakes.wake()

        threads.submit(act_and_tell)

    def _read(self, read: Read) -> None:
        room = min(read.most_bytes, _MOST_BATCH_BYTES, max(_LEAST_BYTES, _MOST_BYTES - self._used_bytes))
        cursor = self._cursors.pop(read.name, None)
        if cursor is None or cursor.position != read.start:
            cursor = Cursor(self._storage, self._contents, read.start)
        try:
            batch = cursor.read(read, room)
            rows = None if batch is None else Rows(batch.num_rows, *pack_rows(batch))
        except Exception as e:
            self._follow()  # the rows may be deleted by now
            self._server.unread(read, e, time.monotonic())
        else:
            self._used_bytes += 0 if batch is None else batch.nbytes
            self._cursors[read.name] = cursor
            self._server.read(read, rows, cursor.position, time.monotonic())

    def _reply(self, reply: Reply) -> None:
        """Send an answer. If the client is gone, or its queue has no room, it asks again."""
        failpoints.reach("serving.batch.before_send")
        try:
            self._answers.send(reply.peer, encode(reply.message, reply.buffers), reply.name)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise


class _Leases(Operations):
    """Does the server's operations. All but ``read_all`` are for the two threads that read and write the log."""

    def __init__(self, storage: LogStorage, contents: LogWriter, expiry: float) -> None:
        self._storage, self._contents, self._expiry = storage, contents, float(expiry)
        self._files = LeaseFiles(storage)
        self._holds: dict[str, Hold] = {}
        self._faults = LimitedLog(__name__, "leases that cannot be read")

    def keys(self) -> set[str]:
        return set(self._files.entries())

    def read_all(self) -> list[Lease]:
        """The leases of all subscribers, each with the present ``subscriberExpiry``."""
        found = []
        for key in self._files.entries():
            try:
                lease = self._files.read(key)
            except LogFormatError as e:  # only its own name cannot be opened
                self._faults.warn("%s", e)
                continue
            if lease is not None and lease.subscriber is not None:
                if lease.timeout != self._expiry:
                    lease = self._files.write(replace(lease, timeout=self._expiry))
                found.append(lease)
        return found

    def take(self, name: str) -> Lease | None:
        key, held = subscriber_key(name), self._holds.get(name)
        hold = held or self._files.hold(key, _LOCK_SECONDS)
        try:
            lease = self._files.read(key)
        except LogError:
            if held is None:
                hold.release()
            raise
        self._holds[name] = hold
        return lease

    def write(self, lease: Lease) -> None:
        self._files.write(lease)

    def announced(self) -> int:
        return read_head(self._storage.store).announced

    def first_since(self, time: int, end: int) -> int:
        chunks = self._contents.covering(self._contents.earliest, end)
        found = first_since(self._storage, chunks, time)
        return end if found is None else found

    def newest(self, start: int, end: int) -> pa.Array:
        return newest_of_topics(self._storage, self._contents, start, end)

    def free(self, name: str) -> None:
        if (hold := self._holds.pop(name, None)) is not None:
            hold.release()

    def remove(self, name: str) -> None:
        self._files.remove(subscriber_key(name))
        self.free(name)

    def free_all(self) -> None:
        for name in list(self._holds):
            with suppress(ZmqDataSourceError):
                self.free(name)


def _prepare(sock: zmq.Socket[bytes]) -> None:
    set_router_options(sock, _RCVHWM, _SNDHWM, _MOST_REQUEST_BYTES)
    # A client that sets a routing id keeps it with a new connection, while the old one may still be there.
    sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
