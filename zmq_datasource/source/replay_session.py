"""Ask one publisher for missing messages (vLLM's replay protocol), as a state machine without a socket or a clock.

There is one request: "send all messages from number N on". One is open at a time. N is the first missing number; if
none is missing, it is the number of the last received message, the *sample*; before there is one, it is ``replayFrom``.

| State | Event | Then |
| --- | --- | --- |
| *idle* | the start, if there is an N | *asked*, and the live flow waits |
| *idle* | a gap shows (at most one request in 0.1 s) | *asked* |
| *idle* | the live flow is silent for 1 second; for 10 after an answer with nothing new | *asked* |
| *asked* | a reply | the deadline moves |
| *asked* | the end marker (*answered*), or no reply for ``timeout`` seconds (*unanswered*) | *idle* |
| *asked* | a new connection, or a restart that the live flow shows | the request is void: *idle* |

A gap is *healed* when its messages have come. It is *given up* when an answer shows that the publisher no longer has
them: it sends its messages in order, so nothing is left between N and the first reply, or from N on if there is no
reply. A gap is given up, too, after three unanswered requests. It is not asked for again, also after a restart of the
query.

What can happen:

* Replies are lost, and even the end marker: the publisher's ROUTER drops what its full queue cannot take. The first
  reply to a request is never dropped. So each request heals or gives up the beginning of what is missing, and the rest
  is asked for again.
* Replies come late, doubled or out of order. Without a request they are dropped; after an unanswered or void request
  the connection is dialled again, so that late replies cannot be taken for new ones. ``sequences`` knows each number
  that was received, and takes none twice, also when the live flow brings it after the replay.
* The replay endpoint is offline. Without a gap it is not asked.
* Live messages come while a request is open. A request for what is missing takes nothing beyond it, because the live
  flow brings that. Other requests may get ahead of the live flow, which then is silent or waits.
* The live flow waits at the start, so that older messages come first. It no longer waits when the request is answered,
  or unanswered and live messages are there. If none are there, the publisher may not have started: it is asked again.
* The query is stopped while a request is open. Its next start asks from what the log has.
* The publisher restarts, and its numbers begin again; the protocol does not say which run of it replies. So if the live
  connection has brought no message yet, N is the sample's number, and gaps wait. The publisher is the same one if its
  first reply equals the sample, or if it no longer has the sample. It is another one if it has another message there,
  or none from there on: then an epoch begins at once, before the live flow brings more, and the publisher is asked for
  all that it has. On the connection of the last message it cannot be another one, so a reply that differs is wrong: all
  are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.messages.columns import MAX_MESSAGE_BYTES
from zmq_datasource.messages.framing.fields import UnfitError
from zmq_datasource.messages.framing.replay import Reply, read_reply
from zmq_datasource.messages.framing.replay import request as encode
from zmq_datasource.sequences import Gap, Sample, SequenceFindings, SequenceTracker
from zmq_datasource.transport.session import Session

_UNANSWERED = 3
_PAUSE_SECONDS = 0.1
_SILENCE, _NOTHING_NEW = 1.0, 10.0
_REPLY_OVERHEAD = 200


@dataclass
class _Request:
    """The open request.

    Attributes:
        start: N.
        to: The last missing number, if something is missing and N is the first missing one; else infinity.
        expected: The epoch of the counter, and its next number, when it was sent.
        connections: Ours, and that of the live flow, when it was sent.
        deadline: When it counts as unanswered.
        holds_live: Whether the live flow waits for it.
        sample: The message with which the first reply is compared; None if that is not needed, or done.
        first_reply: The number of the first reply; infinity before.
        ended: Whether the end marker has come.
    """

    start: int
    to: float
    expected: tuple[int, int | None]
    connections: tuple[int, int | None]
    deadline: float
    holds_live: bool
    sample: Sample | None
    first_reply: float = math.inf
    ended: bool = False


class ReplaySession(Session):
    """Asks one publisher.

    Args:
        publisher: The endpoint of the publisher's live messages, by which they are counted.
        replays: The endpoint of its ROUTER, for log lines.
        timeout: Seconds without a reply after which a request counts as unanswered.
        replay_from: The number to ask from as long as no message was received; None to ask for none then.

    Attributes:
        live: The connection of the live flow that is up; None if none is. The caller sets it.
        reachable: Whether the publisher's ROUTER is connected. The caller sets it.
        replies: The replies that were received and not taken yet.
        reply_bytes: Their bytes.
        log: Where warnings go.
    """

    def __init__(
        self,
        publisher: str,
        replays: str,
        timeout: float,
        counters: SourceCounters,
        tracker: SequenceTracker,
        replay_from: int | None,
    ) -> None:
        super().__init__()
        self._publisher, self._replays, self._timeout = publisher, replays, timeout
        self._key = publisher.encode()
        self._counters, self._tracker, self._replay_from = counters, tracker, replay_from
        self._request: _Request | None = None
        self._connection = self._unanswered = 0
        self._due, self._pause_until = math.inf, 0.0
        self._lost: list[Gap] = []
        self.replies: list[Reply] = []
        self.reply_bytes = 0
        self.live: int | None = None
        self.reachable = False
        self.log = LimitedLog(__name__, "lines about replays")

    @property
    def holds_live(self) -> bool:
        """Whether the live flow must wait, because a replay brings older messages first."""
        return self._request is not None and self._request.holds_live

    def start(self, now: float) -> None:
        """Ask for what was missed, or for history, while the live flow waits."""
        self.note_live(now)
        self._ask(now, holds_live=True)

    def note_live(self, now: float) -> None:
        """A live message has come, or a live connection: the silence begins again."""
        self._due = now + _SILENCE

    def note_pause(self, now: float) -> None:
        """Nothing was received until now, so this time was no silence."""
        if self._request is not None:
            self._request.deadline = now + self._timeout
        self._due = max(self._due, now + _SILENCE)

    def reconnected(self, now: float) -> None:
        self._connection += 1

    def blocked(self) -> None:
        """Do not send the request later: the publisher is offline, and the request ends at its deadline."""
        self.outbox.clear()

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
        if (request := self._request) is None:
            return
        request.deadline = now + self._timeout
        self._unanswered = 0
        if reply is None:
            request.ended = True
        elif reply.sequence >= request.start:
            request.first_reply = min(request.first_reply, reply.sequence)
            if reply.sequence <= request.to:
                self.replies.append(reply)
                self.reply_bytes += len(reply.value) + len(reply.topic or b"") + _REPLY_OVERHEAD

    def take(self, now: float) -> Sequence[Reply]:
        """Take the received replies, if the request is still valid."""
        if (request := self._request) is None:
            return []
        ours, live = request.connections
        # A request sent before there was a live connection is compared with the sample: it may be for any connection.
        same = (
            ours == self._connection
            and live in (None, self.live)
            and request.expected[0] == self._expected[0]
        )
        if not same:
            self._end_request(redial=True)
            self.note_live(now)
            return []
        replies = self._clear_replies()
        if replies and request.sample is not None:
            number = request.sample.number
            if any(r.sequence == number and Sample.of(number, r.value) != request.sample for r in replies):
                self._refuse(request, number, now)
                return []
            self._tracker.note_connection(self._key)
            request.sample = None
        return replies

    def _refuse(self, request: _Request, number: int, now: float) -> None:
        """Drop all replies: one is another message than the publisher has sent under its number."""
        self._end_request(redial=True)
        if not self._is_same_publisher():
            self._restart(request, now)
            return
        self._due = now + _NOTHING_NEW
        words = "%s repeats sequence %d with another value than %s has published: the replay is dropped"
        self.log.warn(words, self._replays, number, self._publisher)

    def _restart(self, request: _Request, now: float) -> None:
        """Begin an epoch, because the publisher has restarted, and ask for all that it has."""
        findings = SequenceFindings()
        self._tracker.restart(self._key, findings)
        self._lost += findings.lost
        self.log.warn("a publisher has restarted: %s", self._publisher)
        self._ask(now, request.holds_live)

    def is_due(self, now: float) -> bool:
        """Whether ``step`` has something to do."""
        if self._request is None:
            return now >= self._due
        return self._request.ended or now >= self._request.deadline

    def step(self, live_waits: bool, now: float) -> Sequence[Gap]:
        """End the request, or ask, if it is time. Call it when all taken replies are tracked.

        Args:
            live_waits: Whether the live flow has messages that were not received.

        Returns:
            The gaps that are lost: they are given up, or the publisher has restarted.
        """
        if self._request is not None:
            if self.is_due(now):
                self._conclude(self._request, live_waits, now)
        elif self._missing():
            if now >= self._pause_until:
                self._ask(now)
            else:
                self._due = self._pause_until
        elif now >= self._due:
            if live_waits or not self.reachable:
                self.note_live(now)
            else:
                self._ask(now, holds_live=self._tracker.expected.get(self._key) is None)
        lost, self._lost = self._lost, []
        return lost

    def _conclude(self, request: _Request, live_waits: bool, now: float) -> None:
        """End the request: it is answered or unanswered."""
        self._end_request(redial=not request.ended)
        if request.ended and request.sample is not None and not self._is_same_publisher():
            self._restart(request, now)  # it has nothing from the sample on
            return
        self._pause_until = now + _PAUSE_SECONDS
        if request.to == math.inf:
            if request.expected == self._expected:
                self._due = now + _NOTHING_NEW
            else:
                self.note_live(now)
        missing = [gap for gap in self._missing() if gap.last <= request.to]
        gone = []
        if request.ended or request.first_reply < math.inf:
            # What another request shows to be missing may still be in the queue of the live flow.
            if request.to < math.inf:
                gone = [gap for gap in missing if gap.last < request.first_reply]
        elif request.holds_live:  # the publisher may not have started
            if live_waits:
                self.log.warn("no replay from %s within %s s", self._replays, self._timeout)
            else:
                self._ask(now, holds_live=True)
            return
        else:
            self._unanswered += 1
            gone = missing if self._unanswered >= _UNANSWERED else []
        if gone:
            self._unanswered = 0
            self._tracker.give_up(gone)
        if self._missing():
            self._due = self._pause_until
        self._lost += gone

    def _ask(self, now: float, holds_live: bool = False) -> None:
        """Send a request, if there is an N."""
        missing, sample, to = self._missing(), self._sample, math.inf
        start = self._tracker.expected.get(self._key)
        if missing and self._is_same_publisher():
            start, to, sample = missing[0].first, missing[-1].last, None
        elif sample is not None:
            start = sample.number
        elif start is None:
            start = self._replay_from
        if start is None:
            self._due = now + _NOTHING_NEW
            return
        self._request = _Request(
            start,
            to,
            self._expected,
            (self._connection, self.live),
            now + self._timeout,
            holds_live,
            sample,
        )
        self.outbox.append(encode(start))
        if holds_live or missing:
            self.log.info("asking %s for messages from sequence %d on", self._replays, start)

    def _end_request(self, redial: bool) -> None:
        """End the request. With ``redial``, drop what is still to come or to be sent on its connection."""
        self._request = None
        self._clear_replies()
        if redial:
            self.redial = True
            self.outbox.clear()

    def _clear_replies(self) -> list[Reply]:
        replies, self.replies, self.reply_bytes = self.replies, [], 0
        return replies

    def _is_same_publisher(self) -> bool:
        """Whether the live connection has brought the last message, or a replay has shown that the publisher has."""
        return self._sample is None or (self.live is not None and self._tracker.is_same_publisher(self._key))

    @property
    def _expected(self) -> tuple[int, int | None]:
        counter = self._tracker.counters.get(self._key)
        return 0 if counter is None else counter.epoch, self._tracker.expected.get(self._key)

    @property
    def _sample(self) -> Sample | None:
        counter = self._tracker.counters.get(self._key)
        return None if counter is None else counter.sample

    def _missing(self) -> list[Gap]:
        return [gap for gap in self._tracker.gaps.missing(self._key) if not gap.lost]
