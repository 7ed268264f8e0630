"""A durable subscriber's side of the conversation with a proxy, as a session. Specified in docs/proxy.md.

The rules:

* The proxy says each second that it is there. After ``SILENCE_SECONDS`` without a word, or without the answer to
  SUBSCRIBE, it is asked with the same SUBSCRIBE, which restarts nothing; after twice as much without a byte the
  connection is given up. A message of 100 MB may take longer than that, and no heartbeat overtakes it: bytes are a sign
  of life too.
* Every connection is a new one to the proxy, and hears SUBSCRIBE with a number of its own, one more than that of the
  connection before: so the proxy knows which connections are given up, in whatever order it hears them.
* What was sent to a connection before, and comes late, comes again.
* What was received and not taken by the caller stays through all that; it is not asked for again.
* A proxy that does not know the subscription any more may have another log, and refuses it. What was acknowledged
  would say nothing about that one: so no ACK leaves before the answer to SUBSCRIBE.
"""

from __future__ import annotations

import math
from collections import deque

from zmq_datasource.errors import NoPeerError, SubscriptionError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.proxy.durable_protocol import (
    SILENCE_SECONDS,
    Ack,
    Acked,
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
    session_number,
    write,
)
from zmq_datasource.transport.link import Session

__all__ = ["SubscriberSession"]

# Acknowledgements are sent together: when so many are due, or nothing else is to be done.
ACK_EVERY = 100
# An answer that has not come is asked for again.
AGAIN_SECONDS = 1.0


class SubscriberSession(Session):
    """A conversation with one proxy; it begins with ``connected``.

    Args:
        name, start, credit, topics: As in SUBSCRIBE.
        timeout: Seconds for which a proxy that was there may be silent while the caller listens; None for ever.
        proxy: Its name in messages.
        client: A random number up to ``MOST_CLIENT``, which tells this client's connections from those of others; 0 for
            none.

    Attributes:
        inbox: Received, and not taken yet.
        ready: Whether the proxy has answered on this connection.
        new: Whether the proxy did not know the name.
        lost: Messages that the proxy's log had no more when they were due.
        handed: The last id that was taken.
        acknowledged: The last id that the caller is done with.
        confirmed: The proxy has on its disk that what is below is done with.
        forgotten: Whether the proxy has ended the subscription.
        refusal: Why the conversation is over.
    """

    def __init__(
        self,
        name: str,
        start: bytes,
        credit: int,
        topics: tuple[bytes, ...],
        timeout: float | None,
        proxy: str,
        client: int = 0,
    ) -> None:
        super().__init__()
        self._readies = LimitedLog(__name__, "times that the proxy was ready")
        self._losses = LimitedLog(__name__, "times that messages were deleted")
        self._name, self._start, self._credit, self._topics = name, start, credit, topics
        self._timeout = timeout
        self._proxy = proxy
        self.inbox: deque[Message] = deque()
        self.ready = self._ready_once = False
        self.new = self.forgotten = False
        self.lost = 0
        self.handed: int | None = None
        self.acknowledged: int | None = None
        self.confirmed = 0
        self.refusal: SubscriptionError | None = None
        self._session = session_number(client, 0)
        self._received: int | None = None  # the id after the last one received
        # The id after the last one that is known to be lost, and when that was said.
        self._lost_to, self._lost_at = 0, 0.0
        self._credit_owed = self._acks_owed = 0
        self._heard = self._asked = 0.0  # the last sign of life on this connection; the last SUBSCRIBE
        self._answered = False  # whether that has its READY
        self._last_word = self._listening = 0.0
        self._insisting: FromClient | None = None
        self._insisted = 0.0

    # The caller.

    def listen(self, now: float) -> None:
        """The caller waits from now on: only then is silence counted."""
        self._listening = now

    def take(self) -> Message | None:
        """The next message, if one has come."""
        if not self.inbox:
            return None
        message = self.inbox.popleft()
        self._credit_owed += 1
        if self._credit_owed >= max(1, self._credit // 2):
            self._give_credit()
        self.handed = message.id
        return message

    def ack(self, done: int) -> None:
        """The caller is done with everything up to this id, which was taken."""
        self.acknowledged = max(done, self.acknowledged or 0)
        self._acks_owed += 1
        if self._acks_owed >= ACK_EVERY:
            self.send_acks()

    def _step_over_lost(self) -> None:
        """What was lost, nobody takes, and the proxy may wait for it: it is done with once all before it is.

        And once the caller waits for what follows. One that dies with what came next hears of the loss again.
        """
        at_work = self.handed is not None and (self.acknowledged is None or self.acknowledged < self.handed)
        if (
            not self.inbox
            and not at_work
            and self._lost_to - 1 > (-1 if self.acknowledged is None else self.acknowledged)
        ):
            self.acknowledged = self._lost_to - 1
            self._acks_owed += 1

    @property
    def unconfirmed(self) -> bool:
        """Whether the proxy has not said that the last acknowledgement is on its disk."""
        return self.acknowledged is not None and self.confirmed <= self.acknowledged

    def send_acks(self) -> None:
        """Send the acknowledgements that are due, without waiting for more; once it is known who hears them."""
        if self.acknowledged is not None and self._answered:
            self._acks_owed = 0
            self.say(Ack(self.acknowledged))

    def insist(self, request: FromClient | None, said: float = -math.inf) -> None:
        """Repeat this each second, where the proxy is there; its answer may be lost. None: no longer.

        Args:
            said: When it was said already.
        """
        self._insisting, self._insisted = request, said

    def say(self, message: FromClient) -> None:
        self.outbox.append(write(message))

    def _give_credit(self) -> None:
        self.say(Credit(self._credit_owed))
        self._credit_owed = 0

    # The connection.

    def connected(self, now: float) -> None:
        """Say who is here, on a connection that has not heard it, and go on where it was."""
        self.outbox.clear()
        self._credit_owed = 0
        self.ready = False
        self._session += 1
        self._heard = now
        self._subscribe(now)

    def _subscribe(self, now: float) -> None:
        """Say who is here, perhaps again: within a session that restarts nothing."""
        self._asked, self._answered = now, False
        # What came before and was not taken yet gives its credit back once it is; what was taken, soon.
        credit = max(0, self._credit - len(self.inbox) - self._credit_owed)
        self.say(Subscribe(self._name, self._session, self._start, self._received, credit, self._topics))

    def alive(self, now: float) -> None:
        self._heard = self._last_word = now

    def blocked(self) -> None:
        """Nothing leaves: the connection is to be made anew."""
        self.outbox.clear()
        self._heard = -math.inf

    def wake(self, now: float) -> None:
        """Do what is due at this time: ask again, or give the connection up.

        Raises:
            NoPeerError: The proxy has been silent for the timeout.
        """
        silent = now - max(self._last_word, self._listening)
        if self._ready_once and self._timeout is not None and silent > self._timeout:
            raise NoPeerError(
                f"receiving as {self._name!r} from {self._proxy}: the proxy has been silent for "
                f"{silent:.0f} s; come again, and it goes on after the last acknowledged message"
            )
        if now - self._heard > 2 * SILENCE_SECONDS:
            self.redial = True
            self.connected(now)
        elif now - max(self._asked, self._heard if self.ready else 0.0) > SILENCE_SECONDS:
            self._subscribe(now)
        if now - self._lost_at >= AGAIN_SECONDS:
            self._step_over_lost()
        if self._acks_owed:
            self.send_acks()
        if self._credit_owed and self.ready:
            self._give_credit()
        if self._insisting is not None and self._answered and now - self._insisted >= AGAIN_SECONDS:
            self._insisted = now
            self.say(self._insisting)

    def receive(self, frames: list[bytes], now: float) -> None:
        """Take in what the proxy has sent.

        Raises:
            ProtocolError: No message of this protocol.
        """
        self._heard = self._last_word = now
        message = read_from_proxy(frames)
        match message:
            case Message(id, _):
                if self.ready:  # else of a session before: it comes again
                    self._received = id + 1
                    self.inbox.append(message)
            case Ready(session, first, _, new):
                if session != self._session:
                    return  # it has been asked again since
                self._readies.info("subscribed as %r at %s, from id %d on", self._name, self._proxy, first)
                self.ready = self._ready_once = self._answered = True
                self.new = self.new or new
                if self._received is None:
                    self._received = first
                if self.unconfirmed:
                    self.send_acks()
            case Acked(position):
                self.confirmed = max(self.confirmed, position)
            case Lost(first, end):
                if not self.ready:
                    return  # of a session before: it comes again
                self.lost += max(0, end - max(first, self._lost_to))
                self._lost_to = self._received = end
                self._lost_at = now
                self._losses.warn(
                    "%r: the ids %d to %d were deleted before they came here", self._name, first, end - 1
                )
            case Forgotten():
                self.forgotten = True
            case Refused("unknown", _):
                # The proxy was restarted: it has to hear who is here; once, for there may be several of these.
                if self.ready:
                    self.connected(now)
            case Refused("gone", _) if isinstance(self._insisting, Forget):
                self.forgotten = True  # and its answer was lost
            case Refused(_, reason):
                self.refusal = SubscriptionError(f"subscribing as {self._name!r} at {self._proxy}: {reason}")
