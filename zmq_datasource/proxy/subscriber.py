"""The client of a proxy's durable endpoint. ``subscriber_session`` has the rules of the conversation."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple, Self, TypeVar

import pyarrow as pa

from zmq_datasource.errors import NoPeerError, OptionError, SubscriptionError
from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import ThisProcess
from zmq_datasource.options.parser import parse, texts_of
from zmq_datasource.options.socket import SocketOptions
from zmq_datasource.proxy.fetch_protocol import EARLIEST, LAST, LATEST, MOST_CLIENT, MOST_NAME_BYTES
from zmq_datasource.proxy.subscriber_session import Received, Start, SubscriberSession, Subscription
from zmq_datasource.transport.connections import find_dead_peers
from zmq_datasource.transport.link import TICK_SECONDS, Link
from zmq_datasource.transport.spec import SocketSpec

_T = TypeVar("_T")

# How often the session gets its turn while the caller takes messages that are in memory.
_TURN_SECONDS = 0.5
# How long the end of a block waits until the last acknowledgement is on the proxy's disk: after an error, and if there
# is no timeout.
_EXIT_SECONDS, _LONG_EXIT_SECONDS = 2.0, 30.0


class DurableMessage(NamedTuple):
    """A message from a proxy.

    Attributes:
        id: Its position in the proxy's log; greater than that of the message before.
        topic: The first frame; empty if the message has only one.
        value: The last frame.
        frames: All frames; a message of a single frame has an empty one in front.
    """

    id: int
    topic: bytes
    value: bytes
    frames: tuple[bytes, ...]


class DurableSubscriber:
    """A named subscription at a proxy; use it in a ``with`` block, in one thread.

    It yields the messages that the subscriber missed while it was away, and then those that the proxy receives, each
    one once and in order.

    ```python
    with DurableSubscriber("tcp://proxy:5558", "billing", topics=["orders."]) as orders:
        for order in orders:
            print(order.id, order.topic, order.value)
    ```

    The proxy keeps the position of the name. The next subscriber of the same name gets the messages after the last
    acknowledged one. So each message is processed at least once, and exactly once if you save the ``id`` together with
    the result.

    Args:
        endpoint: The proxy's ``durable`` endpoint.
        name: The name of the subscription, 1 to 200 bytes. Only one client at a time can use it.
        topics: Topic prefixes; all messages if there are none. They may differ from those of the last time.
        start: Where an unknown name begins: ``earliest``, ``latest`` (the next message that the proxy receives),
            ``last`` (the newest message of each topic, then all later ones), an id, or a time (a ``datetime`` with a
            time zone), which means the first message that the proxy received then or later.
        auto_ack: Whether a message is acknowledged when the next one is asked for (and the last one at the
            end of the block, unless an error ends it). If not, call ``ack``.
        max_bytes: About how many bytes one answer of the proxy has. Up to two answers are in memory here, each with at
            least one message.
        timeout: Seconds to wait for the proxy, at the start and whenever it is away; None waits for ever.
        options: Options of libzmq, such as ``zmq_curve_serverkey``; in snake_case or as documented.

    Raises:
        OptionError: An argument is wrong.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        topics: Iterable[str | bytes] = (),
        start: str | int | datetime = "earliest",
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
        self._name = name
        self._auto_ack = auto_ack
        self._timeout = timeout
        self._spec = _spec(endpoint, texts_of(SocketOptions, options))
        self._endpoint = self._spec.connect
        prefixes = tuple(t.encode() if isinstance(t, str) else t for t in topics)
        self._subscription = Subscription(
            name, _start(start), prefixes, max_bytes, timeout, str(self._endpoint)
        )
        self._begin()

    def _begin(self) -> None:
        """Begin where the proxy's position is, without what an earlier ``with`` block has in memory."""
        client = secrets.randbelow(MOST_CLIENT) + 1
        self._session = SubscriberSession(self._subscription._replace(client=client))
        self._link = Link(self._spec, self._session, find_dead_peers)
        self._process = ThisProcess(f"the DurableSubscriber {self._name}")
        self._next_turn = 0.0
        self._listened_at = time.monotonic()  # when the last wait for messages ended
        self._given: int | None = None  # the id of the caller's last message, if it is not acknowledged

    def __repr__(self) -> str:
        return f"DurableSubscriber({self._endpoint}, {self._name!r})"

    @property
    def lost(self) -> int:
        """How many messages the proxy had deleted (``walMaxBytes``) before it could send them to the present block."""
        return self._session.lost

    @property
    def new(self) -> bool:
        """Whether the proxy did not know the name."""
        return self._session.new

    def __enter__(self) -> Self:
        """Connect, and wait for the proxy.

        Raises:
            EndpointError: The endpoint cannot be connected.
            NoPeerError: No proxy has answered within ``timeout``.
            SubscriptionError: The proxy has refused.
        """
        self._begin()
        self._link.open()
        self._session.reconnected(time.monotonic())
        try:
            if not self._run_until(lambda: self._session.is_open, self._timeout):
                advice = "check that the proxy runs, and that this is its durable endpoint"
                raise NoPeerError(
                    f"subscribing as {self._name!r} at {self._endpoint}: no proxy has answered within "
                    f"{self._timeout} s; {next(iter(self._link.watch.refused.values()), advice)}"
                )
        except BaseException:
            self._link.close(0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        *_: object,
    ) -> None:
        """Acknowledge the last message, wait until that is on the proxy's disk, and disconnect. The subscription stays.

        If an error ends the block, the last message is not acknowledged, and comes again. In a forked child this does
        nothing.

        Raises:
            NoPeerError, SubscriptionError: The proxy is away or refuses, so the last acknowledgements may be lost.
        """
        session = self._session
        if not self._link.is_open or self._process.is_forked:
            return
        try:
            if session.refusal is not None:
                return  # the proxy takes no more acknowledgements of this session
            if kind is None:
                self._acknowledge_given()
            if session.has_unconfirmed:
                try:
                    self._wait_until_confirmed(
                        session.inbox.done,
                        _EXIT_SECONDS if kind is not None else self._timeout or _LONG_EXIT_SECONDS,
                    )
                except (NoPeerError, SubscriptionError):
                    if kind is None:
                        raise  # otherwise the error that has ended the block says more
        finally:
            self._link.close(1000)

    # Messages.

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
                received = self._session.inbox.take()
                if received is None:
                    break
                yield self._hand_over(received)

    def receive(self, timeout: float | None = None) -> DurableMessage | None:
        """Wait for the next message.

        Args:
            timeout: Seconds to wait for one; None waits for ever.

        Returns:
            None if none came in time.

        Raises:
            NoPeerError: The proxy was away for the subscriber's ``timeout``.
            SubscriptionError: The proxy has refused, for example because another client has the name now.
        """
        received = self._wait_for(self._session.inbox.take, timeout)
        return None if received is None else self._hand_over(received)

    def receive_batch(self, timeout: float | None = None) -> pa.RecordBatch | None:
        """Wait for the next messages, and return those of one answer of the proxy, as Arrow columns.

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
        batch = self._wait_for(self._session.inbox.take_batch, timeout)
        if batch is not None and self._auto_ack:
            self._given = self._session.inbox.handed
        return batch

    def _wait_for(self, take: Callable[[], _T | None], timeout: float | None) -> _T | None:
        """Acknowledge what the caller has, and wait until ``take`` returns something; None if that takes too long."""
        self._check_open()
        self._acknowledge_given()
        session, now = self._session, time.monotonic()
        # The proxy is not to blame for the time that the caller was busy.
        session.excuse_silence(self._listened_at, now)
        self._listened_at = now
        # Also while messages are in memory: the session sends the position, and asks for more.
        if now >= self._next_turn:
            self._next_turn = now + _TURN_SECONDS
            self._run(0.0)
        taken = take()
        if taken is None:
            deadline = math.inf if timeout is None else now + timeout
            while taken is None:
                self._run(min(TICK_SECONDS, max(0.0, deadline - time.monotonic())))
                taken = take()
                self._listened_at = time.monotonic()
                if taken is None and self._listened_at >= deadline:
                    return None
        return taken

    def _check_open(self) -> None:
        self._process.check()
        if not self._link.is_open:
            raise OptionError(
                f"using the DurableSubscriber {self._name} outside of its block: write "
                "with DurableSubscriber(...) as subscriber: ..., and call its methods there"
            )

    def _hand_over(self, received: Received) -> DurableMessage:
        number, frames = received
        if self._auto_ack:
            self._given = number
        return DurableMessage(number, frames[0], frames[-1], frames)

    def ack(self, message: DurableMessage | int, wait: bool = False) -> None:
        """Acknowledge all messages up to this one: they do not come again.

        Args:
            message: The message, or its id.
            wait: Whether to wait until the position is on the proxy's disk.

        Raises:
            OptionError: There was no such message yet.
            NoPeerError, SubscriptionError: With ``wait``: the proxy was away for ``timeout``, or has refused.
        """
        self._check_open()
        session = self._session
        done = message if isinstance(message, int) else message.id
        if session.inbox.handed is None or done > session.inbox.handed:
            raise OptionError(f"ack of id {done}, which has not come yet")
        failpoints.reach("proxy.ack.before_send")
        session.inbox.ack(done)
        if wait:
            self._wait_until_confirmed(done + 1, self._timeout)

    def _acknowledge_given(self) -> None:
        if self._given is not None:
            failpoints.reach("proxy.ack.before_send")
            self._session.inbox.ack(self._given)
            self._given = None

    def seek(self, to: str | int | datetime) -> None:
        """Continue at another place; return when the new position is on the proxy's disk.

        Args:
            to: As ``start``.

        Raises:
            OptionError: ``to`` is not a place.
            NoPeerError: The proxy does not answer.
            SubscriptionError: The proxy has refused.
        """
        self._check_open()
        self._given = None
        self._session.seek(_start(to), time.monotonic())
        self._link.send_outbox()
        if not self._run_until(lambda: self._session.is_open, self._timeout):
            raise NoPeerError(f"moving {self._name!r} at {self._endpoint}: no answer")

    def forget(self) -> None:
        """End the subscription: the proxy keeps no position and no messages for it.

        Raises:
            NoPeerError: The proxy does not answer.
            SubscriptionError: The proxy has refused.
        """
        self._check_open()
        self._given = None
        self._session.forget(time.monotonic())
        self._link.send_outbox()
        if not self._run_until(lambda: self._session.forgotten, self._timeout):
            raise NoPeerError(f"forgetting {self._name!r} at {self._endpoint}: no answer")
        self._link.close(0)

    def _wait_until_confirmed(self, wanted: int, seconds: float | None) -> None:
        """Wait until the position on the proxy's disk has reached this id."""
        session = self._session
        session.confirm(True, time.monotonic())
        self._link.send_outbox()
        try:
            if not self._run_until(lambda: session.confirmed >= wanted, seconds):
                raise NoPeerError(
                    f"acknowledging id {wanted - 1} at {self._endpoint}: no answer within {seconds:g} s; the message "
                    "may come again"
                )
        finally:
            session.confirm(False, time.monotonic())
        failpoints.reach("proxy.ack.after_confirmed")

    def _run_until(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Run the session until ``done()``, for so many seconds at most; return whether it is.

        Messages that come meanwhile stay in the inbox.
        """
        began = time.monotonic()
        self._session.restart_silence(began)
        while not done():
            if seconds is not None and time.monotonic() - began >= seconds:
                return False
            self._run(TICK_SECONDS)
        return True

    def _run(self, wait: float) -> None:
        """Receive and send for up to ``wait`` seconds, until something has come."""
        if self._session.refusal is None:
            self._link.run_once(wait)
        if self._session.refusal is not None:
            raise self._session.refusal


def _start(start: str | int | datetime) -> Start:
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise OptionError(
                f"start={start!r}: it has no time zone; set one, as in datetime.now(timezone.utc)"
            )
        return Start(since=max(0, round(start.timestamp() * 1e6)))
    if isinstance(start, int) and 0 <= start < 2**63:
        return Start(start)
    if start in (EARLIEST, LATEST, LAST):
        return Start(start)
    raise OptionError(f"start={start!r}: it is {EARLIEST}, {LATEST}, {LAST}, an id, or a time")


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
