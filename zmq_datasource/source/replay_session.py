"""Ask one publisher for missing messages (vLLM's replay protocol), as a session without a socket.

The rules:

* One request is open at a time. It asks for all messages from the first missing one on, because the protocol has no end
  of range. Messages that were not missing are dropped when they arrive.
* The publisher's ROUTER drops replies when its queue is full: in the middle of a replay, and even the last reply. So
  the end of a replay proves nothing. Messages that are still missing are asked for again, as long as each request
  brings some.
* If a whole replay brings none of them, the publisher no longer has them. After silence a request is repeated, until
  three have brought none. Then the gap is final: it is not asked for again, not even after a restart of the query.
* A loss at the end of a burst leaves no gap. So when the live flow is silent for a second, the session asks for the
  messages after the last one; then after 2 seconds, 4, and so on up to a minute, until a message or a connection comes.
* The protocol does not say which publisher's messages it repeats. So such a request begins with a message that was
  received, the *sample*. Suppose that the live flow has had a new connection since then, or this process is new. If the
  publisher now has another message under the sample's number, it has restarted. If it has messages, but none from that
  number on, it has restarted, too, and all of them are new. Older gaps are asked for only after this comparison. On the
  same connection a publisher cannot have restarted: then a replay with another message is wrong, and is dropped.
* A request belongs to an epoch and to a connection. When the publisher restarts, older requests are void. After silence
  the connection is dialled again, so that late replies cannot be taken for new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.messages.columns import MAX_MESSAGE_BYTES
from zmq_datasource.messages.framing.fields import UnfitError
from zmq_datasource.messages.framing.replay import Reply, read_reply
from zmq_datasource.messages.framing.replay import request as encode
from zmq_datasource.sequences import Gap, Sample, SequenceTracker
from zmq_datasource.transport.session import Session

_ATTEMPTS = 3
# The pause between two requests for gaps. Otherwise a publisher might be asked once for each message that it loses.
_PAUSE_SECONDS = 0.1
_REPLY_OVERHEAD = 200


@dataclass
class _Request:
    """A request to the publisher, with the replies to it that were received and not taken yet.

    Attributes:
        start: The first sequence that is asked for.
        to: In a request for gaps, the last missing sequence.
        missing: In a request for gaps, how many messages were missing when it was sent.
        expected: In a request onwards, the sequence that the counter expected when it was sent.
        onwards: Whether it asks for messages after the last one, and not for gaps.
        history: Whether it asks for history, for which the live flow waits.
        sample: The message with which the replies are compared; None once they are believed.
        doubted: Whether the publisher did not have the sample, so that it has restarted if it has any message.
        epoch: The counter's epoch when the request was sent.
        connection, live: The connection of the session, and that of the live flow, when the request was sent.
        deadline: When the request ends if no reply comes.
        ended: Whether the publisher has said that a reply was the last one.
    """

    start: int
    to: int = 0
    missing: int = 0
    expected: int | None = None
    onwards: bool = False
    history: bool = False
    sample: Sample | None = None
    doubted: bool = False
    epoch: int = 0
    connection: int = 0
    live: int | None = None
    deadline: float = 0.0
    ended: bool = False
    replies: list[Reply] = field(default_factory=list)
    reply_bytes: int = 0


class Silence:
    """Decides when a silent live flow is a reason to ask for more.

    Attributes:
        first_seconds, longest_seconds: The silence before the first request. It doubles each time, up to the longest.
        over_at: When the live flow counts as silent, if it brings nothing.
        hurried: Whether to ask at once.
        caught_up: Whether the publisher had nothing more when it was asked last, and nothing has come since.
    """

    first_seconds, longest_seconds = 1.0, 60.0

    def __init__(self) -> None:
        self._seconds = self.first_seconds
        self.over_at = 0.0
        self.hurried = self.caught_up = False

    def restart(self, now: float) -> None:
        """Begin again with the shortest silence, because a message has come or the live flow has a new connection."""
        self._seconds = self.first_seconds
        self.over_at = now + self._seconds
        self.hurried = self.caught_up = False

    def extend(self, now: float) -> None:
        """Do not count the time until now, because nothing was received in it."""
        self.over_at = max(self.over_at, now + self._seconds)

    def back_off(self, now: float) -> None:
        """Wait for twice as long, because the publisher had nothing more."""
        self.hurried, self.caught_up = False, True
        self._seconds = min(self._seconds * 2, self.longest_seconds)
        self.over_at = now + self._seconds

    def is_over(self, now: float) -> bool:
        return self.hurried or now >= self.over_at


class ReplaySession(Session):
    """Fills the gaps of one publisher.

    Args:
        publisher: The endpoint of the publisher's live messages, by which they are counted.
        replays: The endpoint of its ROUTER, for log lines.
        timeout: Seconds without a reply after which a request ends.
        counters: The counters to increase.
        tracker: Tracks the sequences of the feed.

    Attributes:
        live: The connection of the live flow that is up; None if none is. The caller sets it.
        reachable: Whether the publisher's ROUTER is connected. The caller sets it.
        log: Where warnings go.
        silence: Decides when to ask for messages after the last one.
    """

    def __init__(
        self,
        publisher: str,
        replays: str,
        timeout: float,
        counters: SourceCounters,
        tracker: SequenceTracker,
    ) -> None:
        super().__init__()
        self._replays, self._timeout = replays, timeout
        self._key = publisher.encode()
        self._counters = counters
        self._tracker = tracker
        self._request: _Request | None = None
        self._connection = 0
        self._attempts = 0
        self._next_request: float | None = None  # when to look again for missing messages
        self.silence = Silence()
        self.log = LimitedLog(__name__, "lines about replays")
        self.reachable = False
        self.live: int | None = None

    @property
    def pending(self) -> int:
        """The number of replies that were received and not taken yet."""
        return 0 if (request := self._request) is None else len(request.replies)

    @property
    def pending_bytes(self) -> int:
        """The bytes of the pending replies."""
        return 0 if (request := self._request) is None else request.reply_bytes

    @property
    def is_asking(self) -> bool:
        """Whether a request is open."""
        return self._request is not None

    @property
    def awaits_history(self) -> bool:
        """Whether a request for history is open, for which the live flow waits."""
        return self._request is not None and self._request.history

    @property
    def onwards(self) -> bool:
        """Whether replies may get ahead of the live flow."""
        return self._request is not None and self._request.onwards

    def extend_deadlines(self, now: float) -> None:
        """Do not count the time until now as silence, because the socket was not read."""
        if self._request is not None:
            self._request.deadline = now + self._timeout
        self.silence.extend(now)

    def hurry(self) -> bool:
        """Ask for messages after the last one without waiting for silence, unless that was done.

        Any thread may call it.

        Returns:
            Whether a replay may bring more messages.
        """
        self.silence.hurried = self.reachable and not self.silence.caught_up
        return self.silence.hurried

    def fetch_history(self, start: int, now: float) -> None:
        """Ask for history. The live flow waits until history has come, or the publisher does not answer."""
        self._ask_onwards(start, now, history=True)

    def receive(self, frames: list[bytes], now: float) -> None:
        """Receive a reply of the publisher."""
        try:
            if sum(map(len, frames)) > MAX_MESSAGE_BYTES:
                raise UnfitError(f"more than {MAX_MESSAGE_BYTES} bytes, which no row can hold")
            reply = read_reply(frames)
        except UnfitError as e:
            self._counters.malformed_replies += 1
            self.log.warn("a reply from %s is not valid: %s", self._replays, e)
            return
        request = self._request
        if request is None:
            return  # it answers a request that has ended
        request.deadline = now + self._timeout
        if reply.sequence is None:
            request.ended = True
            return
        request.replies.append(reply)
        request.reply_bytes += len(reply.value) + len(reply.topic or b"") + _REPLY_OVERHEAD

    def reconnected(self, now: float) -> None:
        self._connection += 1

    def blocked(self) -> None:
        """Do not send the request later: the publisher is away, and the request ends at its deadline."""
        self.outbox.clear()

    def take(self, now: float) -> tuple[Sequence[Reply], bool]:
        """Take the received replies. They are dropped if the publisher or a connection is a new one since the request.

        Returns:
            The replies, and whether they are the first of a publisher that has restarted.
        """
        request = self._request
        if request is None:
            return [], False
        replies, request.replies, request.reply_bytes = request.replies, [], 0
        # A request for gaps may have waited in the queue for this connection, and was meant for another publisher.
        moved = not request.onwards and request.live != self.live
        if request.connection != self._connection or moved or request.epoch != self._epoch:
            self._request = None
            self._reopen()
            self.silence.restart(now)
            return [], False
        if request.sample is None or not replies:
            return replies, False
        return self._compare(request, request.sample, replies, now)

    def _compare(
        self,
        request: _Request,
        sample: Sample,
        replies: Sequence[Reply],
        now: float,
    ) -> tuple[Sequence[Reply], bool]:
        """``take`` for the first replies: find out whether the publisher has restarted."""
        if request.doubted:
            request.sample = None
            request.epoch += 1  # as the tracker will do for this restart
            return replies, True
        numbered = ((reply.sequence, reply.value) for reply in replies if reply.sequence is not None)
        replied = next((Sample.of(*one) for one in numbered if one[0] >= sample.number), None)
        if replied is None:
            return [], False  # all are below the first sequence that was asked for
        if replied.number == sample.number and replied != sample:
            self._reopen()
            if self._is_same_publisher():
                self._request = None
                self.silence.back_off(now)
                self.log.warn(
                    "%s repeats sequence %d with another value than %s has published: the replay is dropped",
                    self._replays,
                    sample.number,
                    self._key.decode(),
                )
            else:
                self._doubt(request, now)
            return [], False
        # If the publisher no longer has the sample, nothing shows a restart: it counts as the same publisher.
        self._tracker.note_connection(self._key)
        request.sample = None
        return replies, False

    def is_due(self, now: float) -> bool:
        """Whether ``step`` has something to do."""
        if self._request is None:
            return self._is_silent(now) or (self._next_request is not None and now >= self._next_request)
        return self._request.ended or now >= self._request.deadline

    def _is_silent(self, now: float) -> bool:
        return self.reachable and self.silence.is_over(now)

    def step(self, live_waits: bool, start: int | None, now: float) -> list[Gap]:
        """Ask for missing messages, or give them up. Call it when all taken replies are tracked.

        Args:
            live_waits: Whether the live flow has messages that were not received.
            start: See ``Intake.first_sequence``.

        Returns:
            The gaps that are given up.
        """
        if self._request is not None:
            if not self.is_due(now):
                return []
            given_up = self._conclude(live_waits, now)
            if given_up or self._request is not None:
                return given_up
        missing = self._missing()
        if not missing:
            self._next_request = None
        elif self._next_request is None or now >= self._next_request:
            self._next_request = now + _PAUSE_SECONDS
            if start is None or self._is_same_publisher():
                count = sum(gap.size for gap in missing)
                self._ask(_Request(missing[0].first, to=missing[-1].last, missing=count), now)
            else:
                self._ask_onwards(start, now)
            return []
        if self._is_silent(now):
            if live_waits:
                self.silence.restart(now)
            elif start is None:
                self.silence.back_off(now)
            else:
                self._ask_onwards(start, now, history=self._tracker.next_number(self._key) is None)
        return []

    def _is_same_publisher(self) -> bool:
        """Whether the connected publisher counts as the one that sent the last message. Without a sample it does."""
        return self._sample is None or (self.live is not None and self._tracker.is_same_publisher(self._key))

    @property
    def _epoch(self) -> int:
        counter = self._tracker.counters.get(self._key)
        return 0 if counter is None else counter.epoch

    @property
    def _sample(self) -> Sample | None:
        counter = self._tracker.counters.get(self._key)
        return None if counter is None else counter.sample

    def _missing(self) -> list[Gap]:
        return [gap for gap in self._tracker.missing(self._key) if not gap.final]

    def _conclude(self, live_waits: bool, now: float) -> list[Gap]:
        """Handle the end of a request, by its last reply or by silence. Returns the gaps that are given up."""
        request = self._request
        assert request is not None
        silent = not request.ended
        unknown = request.sample is not None and not request.doubted
        if unknown and not silent and not self._is_same_publisher():
            self._doubt(request, now)  # the publisher has nothing from the sample on
            return []
        self._request = None
        if silent:
            self._reopen()
        if not request.onwards:
            return self._conclude_gaps(request, silent, now)
        if self._tracker.next_number(self._key) == request.expected and self._epoch == request.epoch:
            self.silence.back_off(now)
        else:
            self.silence.restart(now)
        if request.history:
            # The live flow's queue may have messages that the replay did not have: receive them before asking for gaps
            self._next_request = now + _PAUSE_SECONDS
            # If history exists and has not come, the live flow shows a gap, which is asked for then.
            if silent and not live_waits:
                # The publisher may not have started: its live flow is silent, too.
                expected = self._tracker.next_number(self._key)
                self._ask_onwards(request.start if expected is None else expected, now, history=True)
            elif silent:
                self.log.warn("no replay from %s within %s s", self._replays, self._timeout)
            return []
        self._attempts = self._attempts + 1 if silent else 0
        has_nothing = request.doubted and request.sample is not None
        missing = self._missing()
        if missing and (has_nothing or self._attempts >= _ATTEMPTS):
            return self._give_up(missing, now)
        return []

    def _conclude_gaps(self, request: _Request, silent: bool, now: float) -> list[Gap]:
        asked_for = [gap for gap in self._missing() if gap.first <= request.to]
        still = sum(gap.size for gap in asked_for)
        self._attempts = 0 if still < request.missing else self._attempts + 1
        if not self._attempts or (silent and self._attempts < _ATTEMPTS):
            return []
        return self._give_up(asked_for, now)

    def _give_up(self, gaps: list[Gap], now: float) -> list[Gap]:
        self._attempts = 0
        if gaps:
            lost = sum(gap.size for gap in gaps)
            self.log.warn(
                "%d messages from %s are missing, and %s did not send them",
                lost,
                self._key.decode(),
                self._replays,
            )
        self._next_request = now + _PAUSE_SECONDS
        return gaps

    def _reopen(self) -> None:
        """Open a new connection, and send nothing on it that was meant for the old one."""
        self.redial = True
        self.outbox.clear()

    def _ask_onwards(self, start: int, now: float, history: bool = False) -> None:
        sample, expected = self._sample, self._tracker.next_number(self._key)
        begin = start if sample is None else sample.number
        self._ask(_Request(begin, expected=expected, onwards=True, history=history, sample=sample), now)

    def _doubt(self, request: _Request, now: float) -> None:
        """Ask for all messages that the publisher has, because it does not have the sample."""
        self._ask(
            replace(
                request,
                start=self._tracker.numbering.start,
                doubted=True,
                ended=False,
                replies=[],
                reply_bytes=0,
            ),
            now,
        )

    def _ask(self, request: _Request, now: float) -> None:
        request.epoch, request.connection = self._epoch, self._connection
        request.live = self.live
        self._request = request
        self.silence.hurried = False
        request.deadline = now + self._timeout
        self.outbox.append(encode(request.start))
        if request.history or not request.onwards:
            self.log.info("asking %s for messages from sequence %d on", self._replays, request.start)
