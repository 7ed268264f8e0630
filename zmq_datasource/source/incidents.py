"""Logs messages that do not fit and messages that are lost, at a limited rate, or ends receiving."""

from __future__ import annotations

from collections.abc import Sequence

from zmq_datasource.errors import MalformedMessageError, MessageLossError, SocketError
from zmq_datasource.host.log_lines import LimitedLog, printable
from zmq_datasource.options import FramingOptions
from zmq_datasource.sequences import Gap, Key
from zmq_datasource.source.facts import names_of
from zmq_datasource.source.intake import Findings, MalformedMessage

# A publisher can choose a very long name. A log line shows at most this many of its characters.
_MOST_SHOWN = 200


class Incidents:
    """Acts on findings, as ``onMalformed`` and ``onLoss`` say.

    Attributes:
        failure: Why receiving must end, as soon as the messages received before are in the log.
    """

    def __init__(self, options: FramingOptions) -> None:
        self._options = options
        self._numbering = options.numbering
        self._malformed = LimitedLog(__name__, "malformed messages")
        self._losses = LimitedLog(__name__, "losses")
        self._restarts = LimitedLog(__name__, "restarts of publishers")
        self.failure: SocketError | None = None

    def act_on(self, findings: Findings) -> None:
        """Act on the findings of a round."""
        if findings.malformed:
            self._report_malformed(findings.malformed)
        for key in findings.restarts:
            self._restarts.warn("a publisher has restarted: %s", self._name(key))
        self.report_lost(findings.lost)

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
        if self._numbering is None or self._options.on_loss == "count":
            return
        for gap in gaps:
            first, last = gap.first, gap.last
            text = f"{gap.size} messages of {self._name(gap.key)} never came: sequences {first} to {last}"
            if self._options.on_loss == "fail":
                self.failure = self.failure or MessageLossError(
                    f"{text}. They are in the gap table. Start the query again: it continues after them. To continue "
                    "without a restart, set onLoss=warn; to fetch them, set replayEndpoint if the publisher has one"
                )
            self._losses.warn("%s", text)

    def flush(self) -> None:
        """Log how many lines were left out; call it now and then."""
        for log in (self._malformed, self._losses, self._restarts):
            log.flush()

    def _name(self, key: Key) -> str:
        assert self._numbering is not None
        names = names_of(self._numbering.by, key)
        return " ".join(f"{name} '{printable(text, _MOST_SHOWN)}'" for name, text in names.items())
