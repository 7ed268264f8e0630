"""Logs messages that do not fit and messages that are lost, at a limited rate, or ends receiving."""

from __future__ import annotations

from collections.abc import Sequence

from zmq_datasource.errors import MalformedMessageError, MessageLossError, SocketError
from zmq_datasource.host.log_lines import LimitedLog, printable
from zmq_datasource.options import FramingOptions
from zmq_datasource.sequences import Gap, Key, SequenceTracker
from zmq_datasource.source.facts import names_of
from zmq_datasource.source.intake import Findings, MalformedMessage

# Warn, once in _DUPLICATES_SECONDS, if more than the share _MANY of _LEAST_MESSAGES or more messages are duplicates.
_LEAST_MESSAGES, _MANY, _DUPLICATES_SECONDS = 1000, 0.03, 600.0
# A publisher can choose a very long name. A log line shows at most this many of its characters.
_MOST_SHOWN = 200
_COUNTED_WRONG = (
    "If each topic has numbers of its own, set sequenceBy=%s, and not deduplicate, which would leave out messages that "
    "came once. "
)


class Incidents:
    """Acts on findings, as ``onMalformed`` and ``onLoss`` say.

    Attributes:
        tracker: The tracker that has the gaps given to ``report_lost``.
        failure: Why receiving must end, as soon as the messages received before are in the log.
    """

    def __init__(self, options: FramingOptions, tracker: SequenceTracker | None) -> None:
        self._options = options
        self.tracker = tracker
        self._malformed = LimitedLog(__name__, "malformed messages")
        self._losses = LimitedLog(__name__, "losses")
        self._restarts = LimitedLog(__name__, "restarts of publishers")
        self._duplicates = LimitedLog(
            __name__, "times of many duplicates", lines=1, seconds=_DUPLICATES_SECONDS
        )
        self._messages = self._counted = 0
        self.failure: SocketError | None = None

    def act_on(self, findings: Findings, messages: int) -> None:
        """Act on the findings of a round that received so many ``messages``."""
        if findings.malformed:
            self._report_malformed(findings.malformed)
        for key in findings.restarts:
            self._restarts.warn("a publisher has restarted: %s", self._name(key))
        if self.tracker is not None:
            self._warn_of_duplicates(self.tracker, messages)
        if self._options.replay_endpoint:
            self.report_lost([gap for gap in findings.abandoned if not gap.final])
        else:
            self.report_lost(findings.gaps)

    def _warn_of_duplicates(self, tracker: SequenceTracker, messages: int) -> None:
        self._messages += messages
        if self._messages < _LEAST_MESSAGES:
            return
        count, by = tracker.totals.duplicates - self._counted, tracker.numbering.by
        if count > _MANY * self._messages:
            self._duplicates.warn(
                "%d of the last %d messages have the number of an earlier message. %sIf the publisher sends messages "
                "again, deduplicate leaves them out",
                count,
                self._messages,
                "" if "topic" in by else _COUNTED_WRONG % ",".join((*by, "topic")),
            )
        self._messages, self._counted = 0, tracker.totals.duplicates

    def _report_malformed(self, messages: Sequence[MalformedMessage]) -> None:
        framing = self._options.framing
        for message in messages:
            self._malformed.warn(
                "a message from %s does not fit framing=%s: %s", message.endpoint, framing, message.reason
            )
        if self._options.on_malformed == "fail":
            first = messages[0]
            self.failure = self.failure or MalformedMessageError(
                f"reading a message from {first.endpoint}: it does not fit framing={framing}: "
                f"{printable(first.reason, 300)}. Correct the "
                "framing, or set onMalformed=keep to make such messages rows without a value, or skip to leave them out"
            )

    def report_lost(self, gaps: Sequence[Gap]) -> None:
        """Log the gaps that no replay will fill, and set ``failure``, as ``onLoss`` says. The tracker counts them."""
        if self.tracker is None or self._options.on_loss == "count":
            return
        for gap in gaps:
            first, last = self.tracker.number(gap.first), self.tracker.number(gap.last)
            text = f"{gap.size} messages of {self._name(gap.key)} never came: sequences {first} to {last}"
            if self._options.on_loss == "fail":
                self.failure = self.failure or MessageLossError(
                    f"{text}. They are in the gap table. Start the query again: it continues after them. To continue "
                    "without a restart, set onLoss=warn; to fetch them, set replayEndpoint if the publisher has one"
                )
            self._losses.warn("%s", text)

    def flush(self) -> None:
        """Log how many lines were left out; call it now and then."""
        for log in (self._malformed, self._losses, self._restarts, self._duplicates):
            log.flush()

    def _name(self, key: Key) -> str:
        assert self.tracker is not None
        names = names_of(self.tracker.numbering.by, key)
        return " ".join(f"{name} '{printable(text, _MOST_SHOWN)}'" for name, text in names.items())
