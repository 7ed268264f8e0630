"""A durable subscriber's side of the conversation with a proxy, as a session. Specified in docs/proxy.md.

The rules:

* One request is open at a time (``transport.session``): it is asked again after ``SILENCE_SECONDS`` without a byte,
  and after twice as much by a new connection. What answers no open request is ignored.
* The next FETCH leaves when the answer before has come, not when the caller has taken its messages: up to two answers
  are in memory.
* ``done`` says that the caller has done with everything below. It moves past an id when the caller has acknowledged
  it, and past ids of other topics (and ids that were lost) when all before is acknowledged and the caller asks for
  more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from zmq_datasource.errors import NoPeerError, SubscriptionError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.proxy.fetch_protocol import (
    MOST_WAIT_MS,
    SILENCE_SECONDS,
    Batch,
    Fetch,
    Forget,
    Forgotten,
    Lost,
    Open,
    Opened,
    Refused,
    decode,
    encode,
    frames_of,
    session_number,
)
from zmq_datasource.transport.session import RequestSession

__all__ = ["SUBSCRIPTION_STATES", "Received", "Start", "SubscriberSession"]

# What becomes of a subscription, by what is said (capital letters: by the proxy). What is not here changes nothing.
SUBSCRIPTION_STATES: Mapping[tuple[str, str], str] = {
    ("closed", "open"): "opening",
    ("opening", "OPENED"): "open",
    ("opening", "REFUSED"): "refused",
    ("open", "seek"): "opening",
    ("open", "REFUSED"): "refused",
    ("open", "forget"): "forgetting",
    ("opening", "forget"): "forgetting",
    ("forgetting", "FORGOTTEN"): "forgotten",
    ("forgetting", "REFUSED"): "refused",
}

# A position that has moved is told so often, also while nothing else is to be asked.
_DONE_SECONDS = 1.0
# Answers in memory: one that the caller takes, and the next one.
_MOST_ANSWERS = 2


class Start(NamedTuple):
    """Where a new name begins.

    Attributes:
        start: ``earliest``, ``latest``, ``last`` or an id.
        since: Or a time, in microseconds since the epoch.
    """

    start: str | int = "earliest"
    since: int | None = None


# A message: its id and its frames.
Received: TypeAlias = tuple[int, tuple[bytes, ...]]


@dataclass(frozen=True)
class _Passed:
    """Behind the messages of an answer: below this id there are no more."""

    next: int


class SubscriberSession(RequestSession):
    """A conversation with one proxy; it begins with ``connected``.

    Args:
        name, start, topics: As in OPEN.
        max_bytes: Of the rows of one answer, about.
        timeout: Seconds for which a proxy that was there may be silent while the caller listens; None for ever.
        proxy: Its name in messages.
        client: A random number up to ``MOST_CLIENT``, which tells this client's OPENs from those of others; 0 for none.

    Attributes:
        state: What has become of the subscription (``SUBSCRIPTION_STATES``).
        new: Whether the proxy did not know the name.
        lost: Messages that the proxy's log had no more when they were due.
        handed: The last id that was taken.
        done: The caller has done with everything below.
        confirmed: The same, on the proxy's disk.
        refusal: Why the conversation is over.
    """

    def __init__(
        self,
        name: str,
        start: Start,
        topics: tuple[bytes, ...],
        max_bytes: int,
        timeout: float | None,
        proxy: str,
        client: int = 0,
    ) -> None:
        super().__init__(SILENCE_SECONDS, 2 * SILENCE_SECONDS)
        self._openings = LimitedLog(__name__, "times that a subscription was opened")
        self._losses = LimitedLog(__name__, "times that messages were deleted")
        self._name, self._start, self._topics = name, start, topics
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._proxy = proxy
        self._session = session_number(client, 1)
        self._seeking = False
        self._confirming = False
        self.state = "closed"
        self._was_open = self.new = False
        self.lost = 0
        self.handed: int | None = None
        self.done = self.confirmed = self._told = 0
        self.refusal: SubscriptionError | None = None
        self._inbox: deque[Received | _Passed] = deque()
        self._answers = 0  # of them, in the inbox
        self._next = 0  # the first id that has not come
        self._passed: int | None = None  # to be done with once the caller asks for more
        self._lost_to = 0
        self._question: Open | Fetch | Forget | None = None
        self._told_at = self._listening = 0.0

    def _step(self, event: str) -> None:
        self.state = SUBSCRIPTION_STATES.get((self.state, event), self.state)

    @property
    def is_open(self) -> bool:
        """Whether the proxy has given the name to this session."""
        return self.state == "open"

    @property
    def forgotten(self) -> bool:
        """Whether the proxy has ended the subscription."""
        return self.state == "forgotten"

    # The caller.

    def listen(self, now: float) -> None:
        """The caller waits from now on: only then is silence counted."""
        self._listening = now

    def take(self) -> Received | None:
        """The next message, if one has come."""
        if self._passed is not None:
            self._step_over()
        while self._inbox:
            received = self._inbox.popleft()
            if not isinstance(received, _Passed):
                self.handed = received[0]
                return received
            self._answers -= 1
            self._passed = received.next
        return None

    def _step_over(self) -> None:
        """Be done with what has no message for the caller, if all before it is."""
        if self._passed is not None and (self.handed is None or self.done > self.handed):
            self.done = max(self.done, self._passed)
            self._passed = None

    def ack(self, last: int) -> None:
        """The caller is done with everything up to this id, which was taken."""
        self.done = max(self.done, last + 1)

    @property
    def has_unconfirmed(self) -> bool:
        """Whether the proxy has not said that the position is on its disk."""
        return self.is_open and self.confirmed < self.done

    def confirm(self, confirming: bool, now: float) -> None:
        """Whether the caller waits until the position is on the proxy's disk."""
        self._confirming = confirming
        if confirming and self.is_open:
            self._fetch(now)

    def forget(self, now: float) -> None:
        """End the subscription itself."""
        self._step("forget")
        self._ask(Forget(name=self._name, session=self._session), now)

    def seek(self, start: Start, now: float) -> None:
        """Go on somewhere else; what was received and not taken is forgotten."""
        self._start, self._seeking = start, True
        self._session += 1
        self._inbox.clear()
        self._answers, self._passed, self.handed = 0, None, None
        self._step("seek")
        self._open(now)

    # Questions.

    def _open(self, now: float) -> None:
        self._step("open")
        self._ask(
            Open(
                name=self._name,
                session=self._session,
                start=self._start.start,
                since=self._start.since,
                seek=self._seeking,
            ),
            now,
        )

    def _fetch(self, now: float) -> None:
        """Ask for what follows, and say what is done."""
        has_room = self._answers < _MOST_ANSWERS
        self._ask(
            Fetch(
                name=self._name,
                session=self._session,
                first=self._next,
                done=min(self.done, self._next),
                max_bytes=self._max_bytes if has_room else 0,
                wait=MOST_WAIT_MS if has_room and not self._confirming else 0,
                confirm=self._confirming,
            ),
            now,
        )

    def _ask(self, question: Open | Fetch | Forget, now: float) -> None:
        self._question = question
        self._mark_asked(now)
        self.outbox.append(encode(question, self._topics if isinstance(question, Open) else ()))
        if isinstance(question, Fetch):
            assert question.done is not None
            self._told, self._told_at = question.done, now

    def _repeat(self, now: float) -> None:
        if isinstance(self._question, Fetch):
            self._fetch(now)  # with what is done by now
        elif self._question is not None:
            self._ask(self._question, now)
        elif self.state == "closed":
            self._open(now)

    def _go_on(self, now: float) -> None:
        """Ask the next question, if there is one."""
        if self.waiting or not self.is_open:
            return
        tells = self.done > self._told and now - self._told_at >= _DONE_SECONDS
        confirms = self._confirming and self.confirmed < self.done
        if self._answers < _MOST_ANSWERS or tells or confirms:
            self._fetch(now)

    # The connection.

    def blocked(self) -> None:
        """Nothing leaves: the connection is to be made anew."""
        self.outbox.clear()
        self._heard = -math.inf

    def wake(self, now: float) -> None:
        """Do what is due at this time: ask, ask again, or give the connection up.

        Raises:
            NoPeerError: The proxy has been silent for the timeout.
        """
        silent = now - max(self._last_word, self._listening)
        if self.waiting and self._was_open and self._timeout is not None and silent > self._timeout:
            raise NoPeerError(
                f"receiving as {self._name!r} from {self._proxy}: the proxy has been silent for "
                f"{silent:.0f} s; come again, and it goes on after the last acknowledged message"
            )
        super().wake(now)
        self._go_on(now)

    def receive(self, frames: list[bytes], now: float) -> None:
        """Take in what the proxy has sent.

        Raises:
            ProtocolError: No message of this protocol.
        """
        self._mark_heard(now)
        message, buffers = decode(frames)
        if isinstance(message, Refused):
            self._refused(message)
        elif getattr(message, "session", None) != self._session:
            return  # an answer to a session before
        match message:
            case Opened():
                self._opened(message)
            case Batch() | Lost():
                self._answered(message, buffers)
            case Forgotten():
                self._step("FORGOTTEN")
                self._close_question()
        self._go_on(now)

    def _close_question(self) -> None:
        self._question = None
        self._mark_answered()

    def _opened(self, message: Opened) -> None:
        if not isinstance(self._question, Open):
            return
        self._close_question()
        self._openings.info("subscribed as %r at %s, from id %d on", self._name, self._proxy, message.next)
        self._step("OPENED")
        self._was_open = True
        self.new = self.new or message.new
        self._next = self.done = self.confirmed = self._told = message.next
        self._lost_to = 0

    def _answered(self, message: Batch | Lost, buffers: Sequence[bytes]) -> None:
        if not self.is_open:
            return
        self.confirmed = max(self.confirmed, message.done or 0)
        if message.first != self._next:
            return  # asked twice, and it has come already
        if isinstance(self._question, Fetch):
            self._close_question()
        if isinstance(message, Lost):
            self.lost += message.next - max(message.first, self._lost_to)
            self._lost_to = message.next
            self._losses.warn(
                "%r: the ids %d to %d were deleted before they came here",
                self._name,
                message.first,
                message.next - 1,
            )
        else:
            self._inbox += frames_of(message, buffers)
        if message.next > self._next:
            self._inbox.append(_Passed(message.next))
            self._answers += 1
            self._next = message.next

    def _refused(self, message: Refused) -> None:
        if message.session not in (None, self._session):
            return
        if message.code == "gone" and self.state == "forgetting":
            self._step("FORGOTTEN")  # and its answer was lost
            self._close_question()
            return
        self._step("REFUSED")
        self.refusal = SubscriptionError(f"subscribing as {self._name!r} at {self._proxy}: {message.reason}")
