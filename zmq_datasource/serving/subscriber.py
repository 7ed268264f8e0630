"""The client of a server of a log. ``subscriber_session`` has the rules of the conversation.

Each act of a subscriber is a generator. Where it must wait for the socket, it yields for how many seconds at most.
``DurableSubscriber`` waits, and ``AsyncDurableSubscriber`` lets the event loop wait.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple, Self, TypeVar

import pyarrow as pa
import zmq

from zmq_datasource.errors import NoPeerError, OptionError
from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import ThisProcess
from zmq_datasource.options.parser import parse, texts_of
from zmq_datasource.options.socket import SocketOptions
from zmq_datasource.serving.protocol import EARLIEST, LAST, LATEST, MOST_NAME_BYTES, MOST_SESSION, Open
from zmq_datasource.serving.subscriber_session import SubscriberSession
from zmq_datasource.transport.connections import find_dead_peers
from zmq_datasource.transport.link import TICK_SECONDS, Link
from zmq_datasource.transport.spec import SocketSpec

_T = TypeVar("_T")
_Act = Generator[float, None, _T]

# How often the session, and the event loop, get their turn while the caller takes messages that are in memory.
_TURN_SECONDS = 0.01
# How long the end of a block that an error ends waits until the last acknowledgement has left.
_LINGER_MS = 100


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
        start: str | int = EARLIEST,
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
        is_id = type(start) is int and 0 <= start < 2**63
        if not is_id and start not in (EARLIEST, LATEST, LAST):
            raise OptionError(f"start={start!r}: it is {EARLIEST}, {LATEST}, {LAST}, or an id")
        self._name, self._start, self._log, self._auto_ack = name, start, log, auto_ack
        self._topics = tuple(t.encode() if isinstance(t, str) else t for t in topics)
        self._max_bytes, self._timeout = max_bytes, math.inf if timeout is None else timeout
        self._spec = _spec(endpoint, texts_of(SocketOptions, options))
        self._begin()

    def _begin(self) -> None:
        """Begin where the server's position is, without what an earlier ``with`` block has in memory."""
        session = secrets.randbelow(MOST_SESSION) + 1
        request = Open(name=self._name, session=session, log=self._log, start=self._start)
        given = request, self._topics, self._max_bytes, self._timeout, str(self._spec.connect)
        self._session = SubscriberSession(*given)
        self._link = Link(self._spec, self._session, find_dead_peers)
        self._process = ThisProcess(f"the {type(self).__name__} {self._name}")
        self._next_turn = 0.0

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
        inbox, last = self._session.inbox, message if isinstance(message, int) else message.id
        if last >= inbox.taken:
            raise OptionError(f"ack of id {last}, which has not come yet")
        failpoints.reach("serving.ack.before_send")
        inbox.acked = max(inbox.acked, last + 1)

    # Acts.

    def _open(self) -> _Act[Self]:
        """Connect, and wait for the server."""
        self._begin()
        try:
            self._link.open()
            self._session.reconnected(time.monotonic())
            yield from self._until(lambda: self._session.is_open)
        except NoPeerError as e:
            refused = list(self._link.watch.refused.values())
            self._link.close(0)
            raise NoPeerError("; ".join([str(e), *refused[:1]])) from None
        except BaseException:
            self._link.close(0)
            raise
        return self

    def _end(self, failed: bool) -> _Act[None]:
        """Acknowledge the last message, and wait until that is on the server's disk; not if an error ends the block."""
        if not self._link.is_open or self._process.is_forked:
            return
        session = self._session
        try:
            if not failed:
                self._acknowledge_taken()
            if session.has_unconfirmed:
                session.confirm(time.monotonic())
                self._link.send_outbox()
                if not failed:
                    yield from self._until(lambda: not session.has_unconfirmed)
                    failpoints.reach("serving.ack.after_confirmed")
        finally:
            self._link.close(_LINGER_MS)

    def _next(self, peek: Callable[[], _T | None], timeout: float | None) -> _Act[_T | None]:
        """Acknowledge what the caller has, and wait until ``peek`` returns something; None if that takes too long."""
        self._check_open()
        self._acknowledge_taken()
        session = self._session
        if not session.inbox.answers or session.has_room or time.monotonic() >= self._next_turn:
            yield 0.0
            self._take_turn()
        if (found := peek()) is None:
            yield from self._until(lambda: peek() is not None, math.inf if timeout is None else timeout)
            found = peek()
        return found

    def _receive(self, timeout: float | None) -> _Act[DurableMessage | None]:
        inbox = self._session.inbox
        received = yield from self._next(inbox.peek, timeout)
        if received is None:
            return None
        number, frames = received
        message = DurableMessage(number, frames[0], frames[-1], frames)
        inbox.hand_over(number, number)  # the last call, so that no interrupt comes before the caller has it
        return message

    def _acknowledge_taken(self) -> None:
        inbox = self._session.inbox
        if self._auto_ack and inbox.acked < inbox.taken:
            failpoints.reach("serving.ack.before_send")
            inbox.acked = inbox.taken

    def _until(self, is_done: Callable[[], bool], seconds: float = math.inf) -> _Act[None]:
        """Wait until ``is_done()``, for so many seconds at most. Messages stay in the inbox."""
        deadline = time.monotonic() + seconds
        while not is_done():
            if self._session.refusal is not None:
                raise self._session.refusal
            if time.monotonic() >= deadline:
                return
            yield TICK_SECONDS
            self._take_turn()

    def _take_turn(self) -> None:
        """Take what has come, and send what is due."""
        self._next_turn = time.monotonic() + _TURN_SECONDS
        self._link.receive_all()  # first, or the session would ask for the same answer again
        self._link.keep_alive()

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
                seconds = next(act)  # which may open the link
                self._link.socket.poll(round(seconds * 1000))
        except StopIteration as e:
            result: _T = e.value
            return result
        except BaseException:
            act.close()
            raise

    def __enter__(self) -> Self:
        """Connect, and wait for the server.

        Raises:
            EndpointError: The endpoint cannot be connected.
            NoPeerError: No server has answered within ``timeout``.
            SubscriptionError: The server has refused.
        """
        return self._run(self._open())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Acknowledge the last message, wait until that is on the server's disk, and disconnect.

        The subscription stays. If an error ends the block, the last message is not acknowledged, and comes again. In a
        forked child this does nothing.

        Raises:
            NoPeerError, SubscriptionError: The server is away or refuses, so the last acknowledgements may be lost.
        """
        self._run(self._end(kind is not None))

    def __iter__(self) -> Iterator[DurableMessage]:
        """Yield messages for ever."""
        while (message := self.receive()) is not None:
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
        inbox = self._session.inbox
        batch = self._run(self._next(inbox.peek_batch, timeout))
        if batch is not None:
            ids = batch.column("id")
            first, last, count = ids[0].as_py(), ids[-1].as_py(), len(ids)
            inbox.hand_over(first, last, count)
        return batch


class AsyncDurableSubscriber(_Subscriber):
    """A ``DurableSubscriber`` for asyncio, with the same arguments and errors. It uses no thread.

    ```python
    async with AsyncDurableSubscriber("tcp://orders:5558", "billing") as orders:
        async for order in orders:
            print(order.id, order.topic, order.value)
    ```

    While no method is awaited for more than five seconds, the server counts the client as away, which does no harm.
    """

    async def _run(self, act: _Act[_T]) -> _T:
        try:
            while True:
                await self._readable(next(act))
        except StopIteration as e:
            result: _T = e.value
            return result
        except BaseException:
            act.close()
            raise

    async def _readable(self, seconds: float) -> None:
        """Wait until the socket has a message, for so many seconds at most."""
        sock = self._link.socket
        if not seconds or int(sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            await asyncio.sleep(0)
            return
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        descriptor = int(sock.getsockopt(zmq.FD))
        loop.add_reader(descriptor, news.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await news.wait()
        finally:
            loop.remove_reader(descriptor)

    async def __aenter__(self) -> Self:
        """See ``DurableSubscriber.__enter__``."""
        return await self._run(self._open())

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """See ``DurableSubscriber.__exit__``."""
        await self._run(self._end(kind is not None))

    async def __aiter__(self) -> AsyncIterator[DurableMessage]:
        """Yield messages for ever."""
        while (message := await self.receive()) is not None:
            yield message

    async def receive(self, timeout: float | None = None) -> DurableMessage | None:
        """See ``DurableSubscriber.receive``. A cancelled call takes no message."""
        return await self._run(self._receive(timeout))


def _spec(endpoint: str, given: Mapping[str, str]) -> SocketSpec:
    wrong = [name for name in given if not name.startswith("zmq.")]
    if wrong:
        raise OptionError(f"options {wrong}: only libzmq's options are allowed, such as zmq_curve_serverkey")
    options = parse(SocketOptions, {**given, "connect": endpoint})
    if len(options.connect) != 1:
        raise OptionError(f"endpoint={endpoint!r}: a subscription has one endpoint")
    return SocketSpec(kind="DEALER", connect=options.connect, rcvhwm=100_000, sndhwm=1000, zmq=options.zmq)
