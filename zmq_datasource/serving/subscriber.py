"""The client of a server of a log. ``subscriber_session`` has the rules of the conversation.

Each act of a subscriber is a generator that yields where it must wait. ``DurableSubscriber`` waits for the socket, and
``AsyncDurableSubscriber`` lets the event loop wait for it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from typing import NamedTuple, Self, TypeVar

import pyarrow as pa
import zmq
from msgspec.structs import replace

from zmq_datasource.errors import NoPeerError, OptionError, SubscriptionError
from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import ThisProcess
from zmq_datasource.options.parser import parse, texts_of
from zmq_datasource.options.socket import SocketOptions
from zmq_datasource.serving.protocol import EARLIEST, LAST, LATEST, MOST_NAME_BYTES, MOST_SESSION, Open
from zmq_datasource.serving.subscriber_session import Received, SubscriberSession, Subscription
from zmq_datasource.transport.connections import find_dead_peers
from zmq_datasource.transport.link import TICK_SECONDS, Link
from zmq_datasource.transport.spec import SocketSpec

_T = TypeVar("_T")
_Act = Generator[None, None, _T]

# How often the session gets its turn while the caller takes messages that are in memory.
_TURN_SECONDS = 0.5
# How long the end of a block waits until the last acknowledgement is on the server's disk: after an error, and if there
# is no timeout.
_EXIT_SECONDS, _LONG_EXIT_SECONDS = 2.0, 30.0
# How often the event loop gets its turn.
_PAUSE_SECONDS = 0.01
# A wait counts a step of it at most so long: if it was longer, this process was stopped.
_LONGEST_STEP = 1.0


class DurableMessage(NamedTuple):
    """A message of a log.

    Attributes:
        id: Its position in the log; greater than that of the message before.
        topic: The first frame; empty if the message has only one.
        value: The last frame.
        frames: All frames; a message of a single frame has an empty one in front.
    """

    id: int
    topic: bytes
    value: bytes
    frames: tuple[bytes, ...]


class _Subscriber:
    """What both subscribers have in common: see ``DurableSubscriber``."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        topics: Iterable[str | bytes] = (),
        start: str | int = "earliest",
        log: str | None = None,
        auto_ack: bool = True,
        max_bytes: int = 4 << 20,
        timeout: float | None = 30.0,
        **options: object,
    ) -> None:
        if isinstance(topics, (str, bytes)):
            raise OptionError(f"topics={topics!r}: it is a list of prefixes, as in [{topics!r}]")
        if max_bytes < 1:
            raise OptionError(f"max_bytes={max_bytes}: no message would ever come; set 1 or more")
        if not 0 < len(name.encode()) <= MOST_NAME_BYTES or not name.isprintable():
            raise OptionError(f"name={name!r}: it has 1 to {MOST_NAME_BYTES} bytes of printable text")
        self._name, self._auto_ack, self._timeout = name, auto_ack, timeout
        self._spec = _spec(endpoint, texts_of(SocketOptions, options))
        self._endpoint = self._spec.connect
        prefixes = tuple(t.encode() if isinstance(t, str) else t for t in topics)
        self._topics, self._max_bytes = prefixes, max_bytes
        self._request = Open(name=name, session=MOST_SESSION, log=log, start=_start(start))
        self._begin()

    def _begin(self) -> None:
        """Begin where the server's position is, without what an earlier ``with`` block has in memory."""
        request = replace(self._request, session=secrets.randbelow(MOST_SESSION) + 1)
        self._session = SubscriberSession(
            Subscription(request, self._topics, self._max_bytes, self._timeout, str(self._endpoint))
        )
        self._link = Link(self._spec, self._session, find_dead_peers)
        self._process = ThisProcess(f"the {type(self).__name__} {self._name}")
        self._next_turn, self._told_refusal = 0.0, False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._endpoint}, {self._name!r})"

    @property
    def lost(self) -> int:
        """How many messages the log had deleted (``walMaxBytes``) before they could be sent to the present block."""
        return self._session.lost

    @property
    def new(self) -> bool:
        """Whether the server did not know the name."""
        return self._session.new

    @property
    def log(self) -> str:
        """The id of the log. Save it with the ``id`` of a message, which means nothing in another log."""
        return self._session.log or ""

    def ack(self, message: DurableMessage | int) -> None:
        """Acknowledge all messages up to this one: they do not come again.

        Args:
            message: The message, or its id.

        Raises:
            OptionError: There was no such message yet.
        """
        self._check_open()
        handed, done = self._session.inbox.handed, message if isinstance(message, int) else message.id
        if handed is None or done > handed:
            raise OptionError(f"ack of id {done}, which has not come yet")
        failpoints.reach("serving.ack.before_send")
        self._session.inbox.ack(done)

    # Acts.

    def _open(self) -> _Act[None]:
        self._begin()
        self._link.open()
        self._session.reconnected(time.monotonic())
        if not (yield from self._until(lambda: self._session.is_open, self._timeout)):
            advice = "check that the server runs, and that this is its durable endpoint"
            raise NoPeerError(
                f"subscribing as {self._name!r} at {self._endpoint}: no server has answered within "
                f"{self._timeout} s; {next(iter(self._link.watch.refused.values()), advice)}"
            )

    def _end(self, failed: bool) -> _Act[None]:
        """Acknowledge the last message, unless an error has ended the block, and wait until that is on the disk."""
        session = self._session
        if not failed:
            self._acknowledge_given()
        if session.refusal is not None:  # the server takes no more acknowledgements of this session
            if not (failed or self._told_refusal) and session.confirmed < session.inbox.done:
                raise session.refusal
            return
        if session.has_unconfirmed:
            seconds = _EXIT_SECONDS if failed else self._timeout or _LONG_EXIT_SECONDS
            try:
                yield from self._confirmed(session.inbox.done, seconds)
            except (NoPeerError, SubscriptionError):
                if not failed:
                    raise

    def _next(self, peek: Callable[[], _T | None], timeout: float | None) -> _Act[_T | None]:
        """Acknowledge what the caller has, and wait until ``peek`` returns something; None if that takes too long."""
        self._check_open()
        self._acknowledge_given()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # Also while messages are in memory: the session sends the position, and asks for more. It first takes the
        # answer that may have come, or it would ask for the same answer again and again.
        if time.monotonic() >= self._next_turn:
            self._next_turn = time.monotonic() + _TURN_SECONDS
            self._link.receive_all()
            self._link.keep_alive()
        while (found := peek()) is None:
            self._check_refusal()
            if time.monotonic() >= deadline:
                return None
            yield
        if self._session.has_room:
            self._link.keep_alive()  # asks for the next answer while the caller processes this one
        return found

    def _receive(self, timeout: float | None) -> _Act[DurableMessage | None]:
        inbox = self._session.inbox
        received = yield from self._next(inbox.peek, timeout)
        if received is None:
            return None
        message = _message(received)
        inbox.hand_over(message.id)  # the last call, so that no interrupt comes before the caller has it
        return message

    def _receive_batch(self, timeout: float | None) -> _Act[pa.RecordBatch | None]:
        inbox = self._session.inbox
        batch = yield from self._next(inbox.peek_batch, timeout)
        if batch is not None:
            last, count = batch.column("id")[-1].as_py(), batch.num_rows
            inbox.hand_over(last, count)
        return batch

    def _acknowledge_given(self) -> None:
        inbox = self._session.inbox
        if self._auto_ack and inbox.handed is not None and inbox.handed >= inbox.done:
            failpoints.reach("serving.ack.before_send")
            inbox.ack(inbox.handed)

    def _confirmed(self, wanted: int, seconds: float | None) -> _Act[None]:
        """Wait until the position on the server's disk has reached this id."""
        session = self._session
        session.confirm(True, time.monotonic())
        self._link.send_outbox()
        try:
            if not (yield from self._until(lambda: session.confirmed >= wanted, seconds)):
                raise NoPeerError(
                    f"acknowledging id {wanted - 1} at {self._endpoint}: no answer within {seconds} s; the message "
                    "may come again"
                )
        finally:
            session.confirm(False, time.monotonic())
        failpoints.reach("serving.ack.after_confirmed")

    def _until(self, is_done: Callable[[], bool], seconds: float | None) -> _Act[bool]:
        """Wait until ``is_done()``, for so many seconds at most; return whether it is. Messages stay in the inbox."""
        waited = 0.0
        while not is_done():
            self._check_refusal()
            if seconds is not None and waited >= seconds:
                return False
            began = time.monotonic()
            yield
            waited += min(time.monotonic() - began, _LONGEST_STEP)
        return True

    def _check_refusal(self) -> None:
        if self._session.refusal is not None:
            self._told_refusal = True
            raise self._session.refusal

    def _check_open(self) -> None:
        self._process.check()
        if not self._link.is_open:
            raise OptionError(
                f"using the {type(self).__name__} {self._name} outside of its block: write "
                f"with {type(self).__name__}(...) as subscriber: ..., and call its methods there"
            )


class DurableSubscriber(_Subscriber):
    """A named subscription to a log; use it in a ``with`` block, in one thread.

    It yields the messages that the subscriber missed while it was away, and then those that the log receives, each
    one once and in order.

    ```python
    with DurableSubscriber("tcp://orders:5558", "billing", topics=["orders."]) as orders:
        for order in orders:
            print(order.id, order.topic, order.value)
    ```

    The server keeps the position of the name. The next subscriber of the same name gets the messages after the last
    acknowledged one. So each message is processed at least once, and exactly once if you save ``log`` and the ``id``
    together with the result.

    Args:
        endpoint: The ``durable`` endpoint of a receiver or a proxy.
        name: The name of the subscription, 1 to 200 bytes. Only one client at a time can use it.
        topics: Topic prefixes; all messages if there are none. They may differ from those of the last time.
        start: Where an unknown name begins: ``earliest``, ``latest`` (the next message that the log receives),
            ``last`` (the newest message of each topic, then all later ones), or an id.
        log: The ``log`` of the ids that you have saved. A server of another log refuses.
        auto_ack: Whether a message is acknowledged when the next one is asked for (and the last one at the
            end of the block, unless an error ends it). If not, call ``ack``.
        max_bytes: About how many bytes one answer of the server has. Up to two answers are in memory here, each with at
            least one message.
        timeout: Seconds to wait for the server, at the start and whenever it is away; None waits for ever.
        options: Options of libzmq, such as ``zmq_curve_serverkey``; in snake_case or as documented.

    Raises:
        OptionError: An argument is wrong.
    """

    def _run(self, act: _Act[_T]) -> _T:
        """Run an act to its end, and its result."""
        try:
            while True:
                next(act)
                self._link.run_once(TICK_SECONDS)
        except StopIteration as e:
            result: _T = e.value
            return result

    def __enter__(self) -> Self:
        """Connect, and wait for the server.

        Raises:
            EndpointError: The endpoint cannot be connected.
            NoPeerError: No server has answered within ``timeout``.
            SubscriptionError: The server has refused.
        """
        try:
            self._run(self._open())
        except BaseException:
            self._link.close(0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Acknowledge the last message, wait until that is on the server's disk, and disconnect.

        The subscription stays. If an error ends the block, the last message is not acknowledged, and comes again. In a
        forked child this does nothing.

        Raises:
            NoPeerError, SubscriptionError: The server is away or refuses, so the last acknowledgements may be lost.
        """
        if not self._link.is_open or self._process.is_forked:
            return
        try:
            self._run(self._end(kind is not None))
        finally:
            self._link.close(0)

    def __iter__(self) -> Iterator[DurableMessage]:
        """Yield messages for ever."""
        while True:
            message = self.receive()
            if message is not None:
                yield message
            # Messages in memory need no call of the connection until its next turn.
            while time.monotonic() < self._next_turn:
                self._process.check()
                self._acknowledge_given()
                received = self._session.inbox.peek()
                if received is None:
                    break
                message = _message(received)
                self._session.inbox.hand_over(message.id)
                yield message

    def receive(self, timeout: float | None = None) -> DurableMessage | None:
        """Wait for the next message.

        Args:
            timeout: Seconds to wait for one; None waits for ever.

        Returns:
            None if none came in time.

        Raises:
            NoPeerError: The server was away for the subscriber's ``timeout``.
            SubscriptionError: The server has refused, for example because another client has the name now.
        """
        return self._run(self._receive(timeout))

    def receive_batch(self, timeout: float | None = None) -> pa.RecordBatch | None:
        """Wait for the next messages, and return those of one answer of the server, as Arrow columns.

        This is several times faster than ``receive`` where many messages wait. With ``auto_ack`` all of them are
        acknowledged when the next ones are asked for. Calls of ``receive`` may come between calls of this.

        Args:
            timeout: As in ``receive``.

        Returns:
            The columns ``id`` (64 bits), ``topic`` and ``value`` (binary), and ``frames`` (list of binary): all frames,
            or null if ``topic`` and ``value`` are all. Of ``max_bytes``, about. None if no message came in time.

        Raises:
            NoPeerError, SubscriptionError: As in ``receive``.
        """
        return self._run(self._receive_batch(timeout))

    def ack(self, message: DurableMessage | int, wait: bool = False) -> None:
        """Acknowledge all messages up to this one: they do not come again.

        Args:
            message: The message, or its id.
            wait: Whether to wait until the position is on the server's disk.

        Raises:
            OptionError: There was no such message yet.
            NoPeerError, SubscriptionError: With ``wait``: the server was away for ``timeout``, or has refused.
        """
        super().ack(message)
        if wait:
            self._run(self._confirmed(self._session.inbox.done, self._timeout))


class AsyncDurableSubscriber(_Subscriber):
    """A ``DurableSubscriber`` for asyncio: its arguments, errors and methods are the same. It uses no thread.

    ```python
    async with AsyncDurableSubscriber("tcp://orders:5558", "billing") as orders:
        async for order in orders:
            print(order.id, order.topic, order.value)
    ```

    While no method is awaited for more than five seconds, the server counts the client as away, which does no harm.
    """

    _next_pause = 0.0

    async def _run(self, act: _Act[_T]) -> _T:
        if time.monotonic() >= self._next_pause:  # also while all that is asked for is in memory
            self._next_pause = time.monotonic() + _PAUSE_SECONDS
            await asyncio.sleep(0)
        try:
            while True:
                next(act)
                self._link.run_once(0.0)
                await self._readable(TICK_SECONDS)
        except StopIteration as e:
            result: _T = e.value
            return result

    async def _readable(self, seconds: float) -> None:
        """Wait until the socket has a message, for so many seconds at most."""
        sock = self._link.socket
        if int(sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            await asyncio.sleep(0)
            return
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        descriptor = int(sock.getsockopt(zmq.FD))
        loop.add_reader(descriptor, news.set)
        try:
            async with asyncio.timeout(seconds):
                await news.wait()
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(descriptor)

    async def __aenter__(self) -> Self:
        """See ``DurableSubscriber.__enter__``."""
        try:
            await self._run(self._open())
        except BaseException:
            self._link.close(0)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """See ``DurableSubscriber.__exit__``."""
        if not self._link.is_open or self._process.is_forked:
            return
        try:
            await self._run(self._end(kind is not None))
        finally:
            self._link.close(0)

    async def __aiter__(self) -> AsyncIterator[DurableMessage]:
        """Yield messages for ever."""
        while True:
            message = await self.receive()
            if message is not None:
                yield message

    async def receive(self, timeout: float | None = None) -> DurableMessage | None:
        """See ``DurableSubscriber.receive``. A cancelled call takes no message."""
        return await self._run(self._receive(timeout))

    async def receive_batch(self, timeout: float | None = None) -> pa.RecordBatch | None:
        """See ``DurableSubscriber.receive_batch``."""
        return await self._run(self._receive_batch(timeout))

    async def confirm(self) -> None:
        """Wait until what was acknowledged is on the server's disk; ``DurableSubscriber.ack`` has ``wait``."""
        self._check_open()
        await self._run(self._confirmed(self._session.inbox.done, self._timeout))


def _message(received: Received) -> DurableMessage:
    number, frames = received
    return DurableMessage(number, frames[0], frames[-1], frames)


def _start(start: str | int) -> str | int:
    if start in (EARLIEST, LATEST, LAST) or (type(start) is int and 0 <= start < 2**63):
        return start
    raise OptionError(f"start={start!r}: it is {EARLIEST}, {LATEST}, {LAST}, or an id")


def _spec(endpoint: str, given: Mapping[str, str]) -> SocketSpec:
    wrong = [name for name in given if not name.startswith("zmq.")]
    if wrong:
        raise OptionError(f"options {wrong}: only libzmq's options are allowed, such as zmq_curve_serverkey")
    options = parse(SocketOptions, {**given, "connect": endpoint})
    if len(options.connect) != 1:
        raise OptionError(f"endpoint={endpoint!r}: a subscription has one endpoint")
    return SocketSpec(
        kind="DEALER",
        connect=options.connect,
        rcvhwm=100_000,
        sndhwm=1000,
        zmq=options.zmq,
        allowed_clients=options.allowed_clients,
    )
