"""Whether what was on the wire is in a receiver's log; at most one finding."""

from __future__ import annotations

from zmq_datasource.workbench.doctor.facts import Durable, Expected
from zmq_datasource.workbench.doctor.findings.finding import Case, Conditions

__all__ = ["LOGS", "LogCase"]


class LogCase(Case):
    """A log, compared with the wire."""

    def __init__(self, log: Durable, expected: Expected) -> None:
        self.log = log
        self.grew = "grew" if log.grew else "did not grow"
        self.holds = "holds nothing" if log.state == "empty" else "grew meanwhile" if log.grew else self.grew
        self.more_than_the_mark = (
            f"; the socket's high-water mark of {expected.rcvhwm:,} would hold back at most that many"
            if log.missing > expected.rcvhwm
            else ""
        )


LOGS: Conditions = (
    {
        "log_behind": lambda c: c.log.state in ("behind", "empty"),
        "log_of_another_feed": lambda c: c.log.state == "foreign",
        "log_not_comparable": lambda c: c.log.state == "unnumbered",
    },
)
