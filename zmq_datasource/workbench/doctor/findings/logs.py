"""Findings about a receiver's log."""

from __future__ import annotations

from collections.abc import Iterator

from zmq_datasource.workbench.doctor.facts import Durable, Expected
from zmq_datasource.workbench.doctor.findings.finding import Finding, Severity

__all__ = ["of_log"]


def of_log(log: Durable, expected: Expected) -> Iterator[Finding]:
    """Whether what was on the wire is in the log; at most one finding."""
    waited = f"{log.seconds:.1f} s"
    if log.state in ("behind", "empty"):
        more = log.missing > expected.rcvhwm
        yield Finding(
            id="log_behind",
            severity=Severity.WARNING,
            endpoint="",
            what="Messages are received and not durable: persistence is outside the socket's high-water mark.",
            evidence=f"{log.missing:,} messages that were on the wire are not in the log {waited} later; it "
            f"{'holds nothing' if log.state == 'empty' else 'grew meanwhile' if log.grew else 'did not grow'}"
            + (
                f"; the socket's mark of {expected.rcvhwm:,} would hold back at most that many"
                if more
                else ""
            ),
            cause="They are in the receiver's socket, which RCVHWM bounds, or in its memory until they are sealed, "
            "which walFlushInterval and walChunkBytes bound; or it has stopped receiving (walMaxBytes), or is not "
            "running. Which of these cannot be told from the log alone.",
            fix="Look at the receiver's backlog and receivePauses (zmq-datasource top). A crash costs what is not "
            "sealed: a shorter walFlushInterval, faster storage, or the acknowledged transport (DEALER to ROUTER), "
            "where the sender keeps it until it is durable.",
        )
    elif log.state == "foreign":
        yield Finding(
            id="log_of_another_feed",
            severity=Severity.WARNING,
            endpoint="",
            what="The log holds messages, and none of these publishers or topics.",
            evidence=f"no counter that was on the wire is in the log, after {waited}",
            cause="It is the log of another feed, or its query reads the messages with another framing.",
            fix="Name the log of this feed, and the framing of its query with -o framing=...",
        )
    elif log.state == "unnumbered":
        yield Finding(
            id="log_not_comparable",
            severity=Severity.NOTE,
            endpoint="",
            what="Whether the log keeps up cannot be told: there are no numbers to compare.",
            evidence=f"the log {'grew' if log.grew else 'did not grow'} in {waited}",
            cause="The messages, or the log's framing, have no sequences.",
            fix="Number the messages and name their framing; or watch backlogAgeMs with zmq-datasource top.",
        )
