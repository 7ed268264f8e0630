"""A durable subscriber: what it missed while it was away, in order, then what comes, without a seam.

The wire is specified in docs/proxy.md; ``durable_protocol`` reads and writes it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import NamedTuple, Self

import zmq

from zmq_datasource.errors import NoPeerError, OptionError, SubscriptionError
from zmq_datasource.options.socket import check_security
from zmq_datasource.options.types import Endpoints, ZmqOptions
from zmq_datasource.proxy.durable_protocol import (
    MOST_NAME_BYTES,
    SILENCE_SECONDS,
    Ack,
    Acked,
    Close,
    Credit,
    Forget,
    Forgotten,
    FromClient,
    Lost,
    Message,
    Ready,
    Refused,
    Subscribe,
    read_from_proxy,
    write,
)
from zmq_datasource.transport.kernel import bytes_received, find_dead_peers
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["DurableMessage", "DurableSubscriber"]

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
# Acknowledgements are sent together: when so many are due, or nothing else is to be done.
_ACK_EVERY = 100
# An answer that has not come is asked for again.
_AGAIN_SECONDS = 1.0
# How long the end of a block waits for the last acknowledgement: after an error, and without a timeout.
_EXIT_SECONDS, _LONG_EXIT_SECONDS = 2.0, 30.0
_LOOK_SECONDS = 0.5


class DurableMessage(NamedTuple):
    """A message from a proxy.

    Attributes:
        id: Its position in the proxy's log; greater than that of the message before.
        topic: The first frame; empty if it came without one.
        value: The last frame.
        frames: All of them.
    """

    id: int
    topic: bytes
    value: bytes
    frames: tuple[bytes, ...]


class DurableSubscriber:
    """A named subscription at a proxy; use it in a ``with`` block, in one thread.

    >>> with DurableSubscriber("tcp://proxy:5558", "billing", topics=["orders."]) as orders:
    ...     for order in orders:
    ...         ...  # doctest: +SKIP

    The proxy keeps how far it has come. Who comes again under the same name gets what follows the last
    acknowledged message: so each is handled at least once, and exactly once by who remembers its ``id`` together
    with what it did.

    Args:
        endpoint: The proxy's ``durable`` endpoint.
        name: Of the subscription, 1 to 200 bytes; two clients at a time cannot share one.
        topics: Prefixes; all messages if there are none. They may change from one time to the next.
        start: Where it begins the first time: ``earliest``, ``latest`` (what comes from now on), or an id.
        auto_ack: Whether a message is acknowledged when the next one is asked for (and the last one at the
            end of the block, unless an error ends it). If not, call ``ack``.
        credit: Most messages that are on the way here.
        timeout: Seconds to wait for the proxy, at the start and whenever it is away; None waits for ever.
        options: Options of libzmq, such as ``{"zmq.curve_serverkey": ...}``.

    Attributes:
        lost: Messages that the proxy's log had no more when they were due (``walMaxBytes``); each time it is
            logged.
        new: Whether the proxy did not know the name.

    Raises:
        OptionError: An argument that cannot be honoured.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        topics: Iterable[str | bytes] = (),
        start: str | int = "earliest",
        auto_ack: bool = True,
        credit: int = 1000,
        timeout: float | None = 30.0,
        options: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(topics, (str, bytes)):
            raise OptionError(f"topics={topics!r}: it is a list of prefixes, as in [{topics!r}]")
        if credit < 1:
            raise OptionError(f"credit={credit}: nothing would ever come; set 1 or more")
        if not 0 < len(name.encode()) <= MOST_NAME_BYTES or not name.isprintable():
            raise OptionError(f"name={name!r}: it has 1 to {MOST_NAME_BYTES} bytes of printable text")
        self._name = name
        self._topics = tuple(t.encode() if isinstance(t, str) else t for t in topics)
        self._start = _start(start)
        self._auto = auto_ack
        self._credit = credit
        self._timeout = timeout
        self._spec = _spec(endpoint, options or {})
        self._open: OpenSocket | None = None
        self._held: deque[Message] = deque()  # came while an acknowledgement was waited for
        self._refusal: SubscriptionError | None = None
        self._received: int | None = None  # the id after the last one received
        self._given: int | None = None  # the last one given to the caller, not acknowledged yet
        self._acknowledged: int | None = None
        self._confirmed = 0
        self._unsent_acks = 0
        self._owed = 0
        self._ready = self._ready_once = False
        self._session = 0
        self._handed: int | None = None  # the last one given to the caller
        self._heard = self._asked = 0.0  # the last word, or byte, on this connection; the last SUBSCRIBE
        self._last_word = self._listening = 0.0
        self._bytes = 0
        self._next_look = 0.0
        self._connections = 0
        self.lost = 0
        self.new = False

    def __repr__(self) -> str:
        return f"DurableSubscriber({self._spec.connect}, {self._name!r})"

    def __enter__(self) -> Self:
        """Connect, and wait for the proxy.

        Raises:
            EndpointError: It cannot be connected.
            NoPeerError: No proxy has answered within ``timeout``.
            SubscriptionError: The proxy refuses.
        """
        self._connect()
        try:
            self._wait_until_ready(self._deadline())
        except BaseException:
            self._close_socket(0)
            raise
        return self

    def _deadline(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Acknowledge what was handled, wait until the proxy has it, and leave. The subscription stays.

        What an error has kept from being handled comes again.

        Raises:
            NoPeerError: The proxy is away, so the last acknowledgements are not known to be kept.
        """
        if self._open is None:
            return
        try:
            if self._refusal is not None:
                return  # somebody else has the name
            if kind is None:
                self._acknowledge_given()
            if self._acknowledged is not None and self._confirmed <= self._acknowledged:
                self._send_acks()
                try:
                    self._wait_until_acknowledged(
                        self._acknowledged,
                        _EXIT_SECONDS if kind is not None else self._timeout or _LONG_EXIT_SECONDS,
                    )
                except (NoPeerError, SubscriptionError):
                    if kind is None:
                        raise  # else there is an error already, which says more
            self._send(Close())
        finally:
            self._close_socket(1000)

    # Messages.

    def __iter__(self) -> Iterator[DurableMessage]:
        """Messages, for ever."""
        while True:
            message = self.receive()
            if message is not None:
                yield message

    def receive(self, timeout: float | None = None) -> DurableMessage | None:
        """The next message.

        Args:
            timeout: Seconds to wait for one; None waits for ever.

        Returns:
            None if none came in time.

        Raises:
            NoPeerError: The proxy was away for the subscriber's ``timeout``.
            SubscriptionError: The proxy has refused: another client has this name, for one.
        """
        self._acknowledge_given()
        self._listening = time.monotonic()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._take(self._tick(deadline))
            if message is not None:
                if self._auto:
                    self._given = message.id
                return message
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def ack(self, message: DurableMessage | int, wait: bool = False) -> None:
        """Everything up to this message is done with: it is not to come again.

        Args:
            message: The message, or its id.
            wait: Whether to wait until the proxy has it on its disk.

        Raises:
            NoPeerError: With ``wait``: the proxy is away for ``timeout``.
        """
        done = message if isinstance(message, int) else message.id
        if self._handed is None or done > self._handed:
            raise OptionError(f"ack of id {done}, which has not come yet")
        self._acknowledged = max(done, self._acknowledged or 0)
        self._unsent_acks += 1
        if self._unsent_acks >= _ACK_EVERY or wait:
            self._send_acks()
        if wait:
            self._wait_until_acknowledged(done, self._timeout)

    def _wait_until_acknowledged(self, done: int, seconds: float | None) -> None:
        began = self._listening = time.monotonic()
        asked = began
        while self._confirmed <= done:
            now = time.monotonic()
            if seconds is not None and now - began >= seconds:
                raise NoPeerError(
                    f"acknowledging id {done} at {self._spec.connect}: no answer within {seconds:g} s; the message "
                    "may come again"
                )
            if now - asked >= _AGAIN_SECONDS and self._ready:  # the answer may have been lost
                asked = now
                self._send_acks()
            came = self._hear(_TICK_SECONDS)
            if isinstance(came, Message):
                self._held.append(came)

    def forget(self) -> None:
        """End the subscription itself: the proxy keeps nothing for it any more.

        Raises:
            NoPeerError: The proxy does not answer.
        """
        self._given = self._acknowledged = None
        deadline = self._deadline()
        asked = -_AGAIN_SECONDS
        self._listening = time.monotonic()
        while True:
            now = time.monotonic()
            if now - asked >= _AGAIN_SECONDS and self._ready:
                asked = now
                self._send(Forget())
            if isinstance(self._hear(_TICK_SECONDS), Forgotten):
                break
            if deadline is not None and now >= deadline:
                raise NoPeerError(f"forgetting {self._name!r} at {self._spec.connect}: no answer")
        self._close_socket(0)

    def _acknowledge_given(self) -> None:
        if self._given is not None:
            given, self._given = self._given, None
            self.ack(given)

    def _tick(self, deadline: float | None) -> Message | None:
        if self._held:
            return self._held.popleft()
        left = (
            _TICK_SECONDS if deadline is None else min(_TICK_SECONDS, max(0.0, deadline - time.monotonic()))
        )
        came = self._hear(left)
        return came if isinstance(came, Message) else None

    def _take(self, message: Message | None) -> DurableMessage | None:
        if message is None:
            return None
        self._owed += 1
        if self._owed >= max(1, self._credit // 2):
            self._send(Credit(self._owed))
            self._owed = 0
        self._handed = message.id
        return DurableMessage(message.id, message.frames[0], message.frames[-1], message.frames)

    # The wire.

    def _connect(self, check_hosts: bool = True) -> None:
        # Without a routing id of its own: a connection that libzmq makes anew is a new one to the proxy too, which
        # sends nothing on it before it has heard SUBSCRIBE. What was lost with the old one is not missed.
        self._open = OpenSocket(self._spec, find_dead_peers, check_hosts=check_hosts)
        self._connections = 0
        self._begin_session()

    def _begin_session(self) -> None:
        """Say who is here, on a connection that has not heard it, and go on where it was."""
        self._owed = 0
        self._ready = False
        self._session += 1
        self._heard = time.monotonic()
        self._subscribe()

    def _subscribe(self) -> None:
        """Say who is here, perhaps again: within a session that restarts nothing."""
        self._asked = time.monotonic()
        self._send(
            Subscribe(self._name, self._session, self._start, self._received, self._credit, self._topics),
        )
        if self._acknowledged is not None and self._confirmed <= self._acknowledged:
            self._send_acks()

    def _send(self, message: FromClient) -> None:
        assert self._open is not None, "use it in a with block"
        try:
            self._open.socket.send_multipart(write(message), zmq.NOBLOCK)
        except zmq.Again:
            self._heard = 0.0  # nothing leaves: the connection is to be made anew

    def _send_acks(self) -> None:
        assert self._acknowledged is not None
        self._unsent_acks = 0
        self._send(Ack(self._acknowledged))

    def _hear(self, seconds: float) -> object:
        """What the proxy says next, after the connection's own affairs; None if nothing came.

        Raises:
            SubscriptionError, NoPeerError: See ``receive``.
        """
        if self._refusal is not None:
            raise self._refusal
        assert self._open is not None, "use it in a with block"
        sock = self._open.socket
        try:
            frames = sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            # Before waiting: what is due is sent, and the connection looked at.
            if self._unsent_acks:
                self._send_acks()
            if self._owed and self._ready:
                self._send(Credit(self._owed))
                self._owed = 0
            self._look_at_connection()
            sock = self._open.socket
            if not sock.poll(max(1, round(seconds * 1000))):
                return None
            frames = sock.recv_multipart()
        self._heard = self._last_word = time.monotonic()
        message = read_from_proxy(frames)
        match message:
            case Ready(session, first, _, new):
                if session != self._session:
                    return None  # it has been asked again since
                _log.info("subscribed as %r at %s, from id %d on", self._name, self._spec.connect, first)
                self._ready = self._ready_once = True
                self.new = self.new or new
                if self._received is None:
                    self._received = first
            case Acked(position):
                self._confirmed = max(self._confirmed, position)
            case Lost(first, end):
                self.lost += end - first
                _log.warning(
                    "%r: the ids %d to %d were deleted before they came here", self._name, first, end - 1
                )
            case Refused(code, reason):
                if code == "unknown":
                    # The proxy was restarted: it is told who is here; once, for there may be several of these.
                    if self._ready:
                        self._begin_session()
                    return None
                self._refusal = SubscriptionError(
                    f"subscribing as {self._name!r} at {self._spec.connect}: {reason}"
                )
                raise self._refusal
            case Message(position, _):
                if not self._ready:
                    return None  # of a session before: it comes again
                self._received = position + 1
        return message

    def _look_at_connection(self) -> None:
        assert self._open is not None
        now = time.monotonic()
        watch = self._open.watch
        watch.update()
        watch.redial()
        if watch.connections > self._connections:
            if watch.connections > 1:  # a new one: the proxy does not know yet who this is
                self._begin_session()
            self._connections = watch.connections
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            before, self._bytes = self._bytes, bytes_received(watch)
            if self._bytes > before:  # it falls where a connection ends, which is no sign of life
                self._heard = self._last_word = now
        silent = now - max(self._last_word, self._listening)
        if self._ready_once and self._timeout is not None and silent > self._timeout:
            raise NoPeerError(
                f"receiving as {self._name!r} from {self._spec.connect}: the proxy has been silent for "
                f"{silent:.0f} s; come again, and it goes on after the last acknowledged message"
            )
        if now - self._heard > 2 * SILENCE_SECONDS:
            # A name that does not resolve (any more) is libzmq's to try again.
            self._close_socket(0)
            self._connect(check_hosts=False)
        elif now - max(self._heard, self._asked) > SILENCE_SECONDS:
            self._subscribe()

    def _wait_until_ready(self, deadline: float | None) -> None:
        while not self._ready:
            came = self._hear(_TICK_SECONDS)
            if isinstance(came, Message):
                self._held.append(came)
            if deadline is not None and time.monotonic() >= deadline:
                why = next(iter(self._open.watch.refused.values()), "") if self._open is not None else ""
                raise NoPeerError(
                    f"subscribing as {self._name!r} at {self._spec.connect}: no proxy has answered within "
                    f"{self._timeout} s; "
                    + (why or "check that the proxy runs, and that this is its durable endpoint")
                )

    def _close_socket(self, linger: int) -> None:
        if self._open is not None:
            self._open.close(linger)
            self._open = None


def _start(start: str | int) -> bytes:
    if isinstance(start, int) and 0 <= start < 2**63:
        return start.to_bytes(8, "big")
    if start in ("earliest", "latest"):
        return str(start).encode()
    raise OptionError(f"start={start!r}: it is earliest, latest, or an id")


def _spec(endpoint: str, given: Mapping[str, str]) -> SocketSpec:
    try:
        connect = Endpoints.read(endpoint)
    except ValueError as e:
        raise OptionError(f"endpoint={endpoint!r}: {e}") from e
    if len(connect) != 1:
        raise OptionError(f"endpoint={endpoint!r}: a subscription is at one proxy")
    wrong = [name for name in given if not name.startswith("zmq.")]
    if wrong:
        raise OptionError(f"options {wrong}: only libzmq's own, as in 'zmq.curve_serverkey'")
    security = ZmqOptions({name.removeprefix("zmq."): value for name, value in given.items()})
    check_security(security)
    return SocketSpec(kind="DEALER", connect=connect, rcvhwm=100_000, sndhwm=1000, zmq=security)
