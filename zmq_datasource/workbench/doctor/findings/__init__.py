"""From figures to findings: what is wrong, on which evidence, why probably, and what to do. Pure.

Modules: ``peer`` judges who answered; ``flow`` what came; ``stalls`` what a stall and a slow receiver
showed; ``logs`` a receiver's log.
"""

from __future__ import annotations

from collections.abc import Sequence

from zmq_datasource.workbench.doctor.facts import Durable, Examined, Expected
from zmq_datasource.workbench.doctor.findings.finding import Finding, Severity
from zmq_datasource.workbench.doctor.findings.flow import of_flow
from zmq_datasource.workbench.doctor.findings.logs import of_log
from zmq_datasource.workbench.doctor.findings.peer import of_peer
from zmq_datasource.workbench.doctor.findings.stalls import of_chain, of_stall

__all__ = ["EXIT_CODES", "Finding", "Severity", "diagnose", "exit_code"]

# What a script gets for the worst finding. 2 is click's, for wrong arguments.
EXIT_CODES = {Severity.NOTE: 0, Severity.WARNING: 1, Severity.UNREACHABLE: 3}


def diagnose(examined: Sequence[Examined], log: Durable | None, expected: Expected) -> list[Finding]:
    """All findings, the worst first."""
    found: list[Finding] = []
    for one in examined:
        found += of_peer(one)
        found += of_flow(one, expected)
        found += of_stall(one, expected)
    found += of_chain(examined)
    if log is not None:
        found += of_log(log, expected)
    return sorted(found, key=lambda finding: -EXIT_CODES[finding.severity])


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if nothing is wrong, 1 if something is, 3 if an endpoint could not be examined."""
    return max((EXIT_CODES[finding.severity] for finding in findings), default=0)
