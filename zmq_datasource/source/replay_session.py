"""Ask one publisher for missing messages (vLLM's replay protocol), as a state machine without a socket or a clock.

There is one request: "send all messages from number N on". One is open at a time. N is the first missing number; if
none is missing, it is the next number; before any message was received, it is ``replayFrom``.

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
* Live messages come while a request is open. A request for what is missing takes nothing beyond it, because the live
  flow brings that. Other requests may get ahead of the live flow, which then is silent or waits.
* The live flow waits at the start, so that older messages come first. It no longer waits when the request is answered,
  or unanswered and live messages are there. If none are there, the publisher may not have started: it is asked again.
* The publisher restarts, and its numbers begin again; no reply says which run of it replies. So gaps are asked for only
  while the connection is up that brought the latest message. Only the live flow shows a restart.
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
from zmq_datasource.sequences import Gap, SequenceTracker
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
        to: The last missing number, if N is missing; else infinity.
        run: The connection on which it was sent, and the epoch of the counter.
        deadline: When it counts as unanswered.
        holds_live: Whether the live flow waits for it.
        first_reply: The number of the first reply; infinity before.
        ended: Whether the end marker has come.
    """

    start: int
    to: float
    run: tuple[int, int]
    deadline: float
    holds_live: bool
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
        live: Whether the live flow is connected. The caller sets it.
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
        self._key, self._replays, self._timeout = publisher.encode(), replays, timeout
        self._counters, self._tracker, self._replay_from = counters, tracker, replay_from
        self._request: _Request | None = None
        self._connection = self._unanswered = 0
        self._due, self._pause_until = math.inf, 0.0
        self.replies: list[Reply] = []
        self.reply_bytes = 0
        self.live = self.reachable = False
        self.log = LimitedLog(__name__, "lines about replays")

    @property
    def holds_live(self) -> bool:
        """Whether the live flow must wait, because a replay brings older messages first."""
        return self._request is not None and self._request.holds_live

    def start(self, now: float) -> None:
        """Ask for what was missed, or for history, while the live flow waits."""
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
        if self._request is not None and self._request.run != self._run:
            self._end_request(redial=True)
            self.note_live(now)
        return self._clear_replies()

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
            The gaps that are given up.
        """
        missing = self._missing()
        if missing:
            self._due = min(self._due, self._pause_until)
        if not self.is_due(now):
            return []
        if self._request is not None:
            return self._conclude(self._request, live_waits, now)
        if missing or (self.reachable and not live_waits):
            self._ask(now)
        else:
            self.note_live(now)
        return []

    def _conclude(self, request: _Request, live_waits: bool, now: float) -> Sequence[Gap]:
        """End the request: it is answered or unanswered. Returns the gaps that are given up."""
        self._end_request(redial=not request.ended)
        nothing_new = request.first_reply == math.inf
        self._due = now + (_NOTHING_NEW if nothing_new else _SILENCE)
        self._pause_until = now + _PAUSE_SECONDS
        # What no request has asked for may still be in the queue of the live flow.
        gone = [gap for gap in self._missing() if gap.last <= request.to < math.inf]
        if request.ended or not nothing_new:
            gone = [gap for gap in gone if gap.last < request.first_reply]
        elif request.holds_live and not live_waits:  # the publisher may not have started
            self._ask(now, holds_live=True)
            return []
        else:
            self.log.warn("no replay from %s within %s s", self._replays, self._timeout)
            self._unanswered += 1
            if self._unanswered < _UNANSWERED:
                return []
        self._tracker.give_up(gone)
        return gone

    def _ask(self, now: float, holds_live: bool = False) -> None:
        """Send a request, if there is an N."""
        missing, to = self._missing(), math.inf
        start = self._replay_from if self._next is None else self._next
        if missing:
            start, to = missing[0].first, missing[-1].last
        if start is None:
            self._due = now + _NOTHING_NEW
            return
        self._request = _Request(start, to, self._run, now + self._timeout, holds_live)
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

    @property
    def _run(self) -> tuple[int, int]:
        counter = self._tracker.counters.get(self._key)
        return self._connection, 0 if counter is None else counter.epoch

    @property
    def _next(self) -> int | None:
        return self._tracker.expected.get(self._key)

    def _missing(self) -> list[Gap]:
        """The gaps to ask for. None while it may be another run of the publisher, which has other messages there."""
        if not self.live or not self._tracker.is_same_publisher(self._key):
            return []
        return [gap for gap in self._tracker.gaps.missing(self._key) if not gap.lost]
