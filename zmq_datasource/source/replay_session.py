"""Asks one publisher for messages again (vLLM's replay protocol), as a session.

The rules:

* One request at a time. It asks for everything from the first missing message on, because the
  protocol has no end of range; what was not missing is left out when it comes.
* The publisher's ROUTER drops replies when its queue is full, in the middle too, and even the end.
  So the end of a replay proves nothing: what is still missing is asked for again, as long as
  each request brings something.
* What a whole replay did not bring the publisher no longer has. After silence a request is
  repeated, three times. Then the gap is settled: it is not asked for again, after a restart either.
* A loss at the end of a burst shows in no number. So a live flow that is silent for a second is asked
  for what follows; then after 2 seconds, 4, up to a minute, until a message or a connection comes.
* The protocol does not say whose messages it repeats. So a request for what follows begins with a
  message that was received, the *sample*. If the live flow has been connected anew since (or we have
  been started), and the publisher has another message under that number, it has restarted; if it
  has none from there on, whatever it has from the beginning is of a new life. Gaps of before are
  asked for only after this comparison. On one and the same connection nobody can have restarted:
  then a replay with another message is wrong, and nothing of it is taken.
* A request belongs to an epoch and to a connection. When the publisher starts anew, what was asked
  of the one before is void; and after silence the connection is made anew, so that late
  replies are not taken for new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.messages.framing.fields import UnfitError
from zmq_datasource.messages.framing.replay import Reply, read_reply
from zmq_datasource.messages.framing.replay import request as encode
from zmq_datasource.messages.schemas import MAX_MESSAGE_BYTES
from zmq_datasource.sequences import Gap, Key, Sample, SequenceTracker
from zmq_datasource.transport.session import Session

__all__ = ["ReplaySession"]

_ATTEMPTS = 3
# Between two requests: a publisher that has nothing more is not to be asked as fast as it loses.
_PAUSE = 0.1
_REPLY_OVERHEAD = 200
# A live flow that is silent for so long is asked for what follows; then ever more rarely.
_FIRST_SILENCE, _LAST_SILENCE = 1.0, 60.0


@dataclass
class _Request:
    """What is being asked for.

    Attributes:
        start: From which position on.
        to: The last missing position, of a request for gaps.
        before: The expected number when it was asked, of a request for what follows.
        onwards: Whether it is for what follows, and not for gaps.
        first: Whether the live flow waits for it: history comes before it.
        sample: What its replies are to be compared with; None if they are believed.
        doubted: Whether the sample was not found: what comes is of a new life of the publisher.
        epoch, connection, live: Of which epoch, and on which connection, ours and the live flow's.
    """

    start: int
    to: int = 0
    before: int | None = None
    onwards: bool = False
    first: bool = False
    sample: Sample | None = None
    doubted: bool = False
    epoch: int = 0
    connection: int = 0
    live: int | None = None


class ReplaySession(Session):
    """Heals the gaps of one publisher.

    Args:
        publisher: Where the publisher's live messages come from, by which they are counted.
        replays: Its ROUTER, in messages.
        timeout: Seconds of silence that end a request.
        counters: Where to count.

    Attributes:
        live: Which connection of the live flow is up, None if none is; to be kept up to date.
        reachable: Whether the publisher's ROUTER is connected; to be kept up to date.
        pending_bytes: Of the replies that were received but not handed over yet.
        log: Where warnings go.
        silent_at: When the live flow counts as silent, if nothing comes.
        all_asked: Whether all was asked for since the live flow was last heard.
    """

    def __init__(self, publisher: str, replays: str, timeout: float, counters: SourceCounters) -> None:
        super().__init__()
        self._publisher, self._replays, self._timeout = publisher, replays, timeout
        self._key = publisher.encode()
        self._counters = counters
        self._request: _Request | None = None
        self._connection = 0
        self._deadline = 0.0
        self._ended = False
        self._missing_before = 0
        self._attempts = 0
        self._next_request: float | None = None  # when to look again for what is missing
        self._wait = _FIRST_SILENCE
        self.silent_at = 0.0
        self._hurried = False
        self.all_asked = False
        self._replies: list[Reply] = []
        self.log = LimitedLog(__name__, "lines about replays")
        self.pending_bytes = 0
        self.reachable = False
        self.live: int | None = None

    @property
    def pending(self) -> int:
        """Replies received but not handed over yet."""
        return len(self._replies)

    @property
    def asks(self) -> bool:
        """Whether a request waits for its replies."""
        return self._request is not None

    @property
    def first(self) -> bool:
        """Whether the live flow waits for this replay: history comes before it."""
        return self._request is not None and self._request.first

    @property
    def onwards(self) -> bool:
        """Whether the replies may go ahead of the live flow."""
        return self._request is not None and self._request.onwards

    def postpone(self, now: float) -> None:
        """Nobody reads at present: that is no silence of the publisher."""
        self._deadline = now + self._timeout
        self.silent_at = max(self.silent_at, now + self._wait)

    def heard(self, now: float) -> None:
        """The live flow has brought something, or has a new connection."""
        self._wait = _FIRST_SILENCE
        self.silent_at = now + self._wait
        self._hurried = self.all_asked = False

    def still_asking(self) -> bool:
        """Whether more may come by a replay; what follows the last message is then asked for at once.

        May be called by any thread.
        """
        self._hurried = self.reachable and not self.all_asked
        return self._hurried

    def fetch_first(self, tracker: SequenceTracker, start: int, now: float) -> None:
        """Ask for history, for which the live flow waits: until it has come, or nothing comes."""
        self._ask_onwards(tracker, start, now, first=True)

    def receive(self, frames: list[bytes], now: float) -> None:
        """Take a reply of the publisher."""
        try:
            if sum(map(len, frames)) > MAX_MESSAGE_BYTES:
                raise UnfitError(f"more than {MAX_MESSAGE_BYTES} bytes, which no row can hold")
            reply = read_reply(frames)
        except UnfitError as e:
            self._counters.malformed_replies += 1
            self.log.warn("a replay from %s makes no sense: %s", self._replays, e)
            return
        if self._request is None:
            return  # nobody has asked for it (any more)
        self._deadline = now + self._timeout
        if reply.sequence is None:
            self._ended = True
            return
        self._replies.append(reply)
        self.pending_bytes += len(reply.value) + len(reply.topic or b"") + _REPLY_OVERHEAD

    def reconnected(self, now: float) -> None:
        self._connection += 1

    def blocked(self) -> None:
        """A queue full of requests is that of a publisher who is away; the silence ends this one."""
        self.outbox.clear()

    def take(self, tracker: SequenceTracker, now: float) -> tuple[Sequence[Reply], bool]:
        """Hand over what was received, unless the publisher has started anew since it was asked.

        Returns:
            The replies, and whether they are the first of a publisher that has restarted.
        """
        replies, self._replies, self.pending_bytes = self._replies, [], 0
        request = self._request
        if request is None:
            return [], False
        # One for gaps may have waited in our queue for this connection, and is not for this publisher.
        moved = not request.onwards and request.live != self.live
        if request.connection != self._connection or moved or request.epoch != _epoch(tracker, self._key):
            self._end_request()
            self._reopen()
            self.heard(now)
            return [], False
        if request.sample is None or not replies:
            return replies, False
        return self._compare(tracker, request, request.sample, replies, now)

    def _compare(
        self,
        tracker: SequenceTracker,
        request: _Request,
        sample: Sample,
        replies: Sequence[Reply],
        now: float,
    ) -> tuple[Sequence[Reply], bool]:
        """Whether it is still the publisher that was heard before; ``take`` for the first replies."""
        if request.doubted:
            request.sample = None
            request.epoch += 1  # the tracker will count it
            return replies, True
        numbered = ((reply.sequence, reply.value) for reply in replies if reply.sequence is not None)
        replied = next((Sample.of(*one) for one in numbered if one[0] >= sample.number), None)
        if replied is None:
            return [], False  # older than what was asked for
        if replied.number == sample.number and replied != sample:
            self._reopen()
            if self._is_certain(tracker):
                self._end_request()
                self._wait_longer(now)
                self.log.warn(
                    "%s repeats sequence %d with another value than %s has published: nothing of that is taken",
                    self._replays,
                    sample.number,
                    self._publisher,
                )
            else:
                self._doubt(tracker, request, now)
            return [], False
        # If it no longer has the sample, nobody knows; then it is taken for the same.
        tracker.confirm_publisher(self._key)
        request.sample = None
        return replies, False

    def is_due(self, now: float) -> bool:
        """Whether ``step`` has something to do."""
        if self._request is None:
            return self._is_silent(now) or (self._next_request is not None and now >= self._next_request)
        return self._ended or now >= self._deadline

    def _is_silent(self, now: float) -> bool:
        return self.reachable and (self._hurried or now >= self.silent_at)

    def step(self, tracker: SequenceTracker, live_waits: bool, start: int | None, now: float) -> list[Gap]:
        """Look at what is still missing, and ask for it or give it up. Call when all was tracked.

        Args:
            live_waits: Whether the live flow has messages that were not received.
            start: What follows the last message; None if nobody knows, or wants to.

        Returns:
            What is given up.
        """
        if self._request is not None:
            if not self.is_due(now):
                return []
            given_up = self._conclude(tracker, live_waits, now)
            if given_up or self._request is not None:
                return given_up
        missing = self._missing(tracker)
        if not missing:
            self._next_request = None
        elif self._next_request is None or now >= self._next_request:
            self._next_request = now + _PAUSE
            if start is None or self._is_certain(tracker):
                self._missing_before = sum(gap.size for gap in missing)
                self._ask(tracker, _Request(missing[0].first, to=missing[-1].last), now)
            else:
                self._ask_onwards(tracker, start, now)
            return []
        if self._is_silent(now):
            if live_waits:
                self.heard(now)
            elif start is None:
                self._wait_longer(now)
            else:
                self._ask_onwards(tracker, start, now, first=tracker.next_number(self._key) is None)
        return []

    def _is_certain(self, tracker: SequenceTracker) -> bool:
        """Whether the publisher that is there now is the one that was last heard, as far as can be known."""
        return _sample(tracker, self._key) is None or (
            self.live is not None and tracker.is_same_publisher(self._key)
        )

    def _missing(self, tracker: SequenceTracker) -> list[Gap]:
        return [gap for gap in tracker.missing(self._key) if not gap.final]

    def _conclude(self, tracker: SequenceTracker, live_waits: bool, now: float) -> list[Gap]:
        """A request has ended, or is silent: whether what it did not bring is given up."""
        request, silent = self._request, not self._ended
        assert request is not None
        unknown = request.sample is not None and not request.doubted
        if unknown and not silent and not self._is_certain(tracker):
            self._doubt(tracker, request, now)  # it has nothing from the sample on
            return []
        self._end_request()
        if silent:
            self._reopen()
        if not request.onwards:
            return self._conclude_gaps(tracker, request, silent, now)
        if tracker.next_number(self._key) == request.before and _epoch(tracker, self._key) == request.epoch:
            self._wait_longer(now)
        else:
            self.heard(now)
        if request.first:
            # What the replay had not, the live flow may have had in its queue meanwhile.
            self._next_request = now + _PAUSE
            # History that did not come though there is more shows as a gap, and is asked for then.
            if silent and not live_waits:
                # The publisher may not be there yet: its live flow is silent too.
                expected = tracker.next_number(self._key)
                self._ask_onwards(tracker, request.start if expected is None else expected, now, first=True)
            elif silent:
                self.log.warn("no replay from %s within %s s", self._replays, self._timeout)
            return []
        self._attempts = self._attempts + 1 if silent else 0
        has_nothing = request.doubted and request.sample is not None
        missing = self._missing(tracker)
        if missing and (has_nothing or self._attempts >= _ATTEMPTS):
            return self._give_up(missing, now)
        return []

    def _conclude_gaps(
        self, tracker: SequenceTracker, request: _Request, silent: bool, now: float
    ) -> list[Gap]:
        asked_for = [gap for gap in self._missing(tracker) if gap.first <= request.to]
        still = sum(gap.size for gap in asked_for)
        self._attempts = 0 if still < self._missing_before else self._attempts + 1
        if not self._attempts or (silent and self._attempts < _ATTEMPTS):
            return []
        return self._give_up(asked_for, now)

    def _give_up(self, gaps: list[Gap], now: float) -> list[Gap]:
        self._attempts = 0
        if gaps:
            lost = sum(gap.size for gap in gaps)
            self.log.warn(
                "%d messages from %s are not to be had from %s", lost, self._publisher, self._replays
            )
        self._next_request = now + _PAUSE
        return gaps

    def _wait_longer(self, now: float) -> None:
        """There is nothing that follows, or nobody who says it."""
        self._hurried, self.all_asked = False, True
        self._wait = min(self._wait * 2, _LAST_SILENCE)
        self.silent_at = now + self._wait

    def _end_request(self) -> None:
        self._request, self._ended = None, False
        self._replies, self.pending_bytes = [], 0

    def _reopen(self) -> None:
        """A new connection, to which nothing that was asked for before is sent."""
        self.redial = True
        self.outbox.clear()

    def _ask_onwards(self, tracker: SequenceTracker, start: int, now: float, first: bool = False) -> None:
        sample, before = _sample(tracker, self._key), tracker.next_number(self._key)
        begin = start if sample is None else sample.number
        self._ask(tracker, _Request(begin, before=before, onwards=True, first=first, sample=sample), now)

    def _doubt(self, tracker: SequenceTracker, request: _Request, now: float) -> None:
        """The sample is not there: ask for all that the publisher has."""
        self._ask(tracker, replace(request, start=tracker.numbering.start, doubted=True), now)

    def _ask(self, tracker: SequenceTracker, request: _Request, now: float) -> None:
        self._end_request()
        request.epoch, request.connection = _epoch(tracker, self._key), self._connection
        request.live = self.live
        self._request = request
        self._hurried = False
        self._deadline = now + self._timeout
        self.outbox.append(encode(request.start))
        if request.first or not request.onwards:
            self.log.info("asking %s for messages from sequence %d on", self._replays, request.start)


def _epoch(tracker: SequenceTracker, key: Key) -> int:
    counter = tracker.counters.get(key)
    return 0 if counter is None else counter.epoch


def _sample(tracker: SequenceTracker, key: Key) -> Sample | None:
    counter = tracker.counters.get(key)
    return None if counter is None else counter.sample
