"""From figures to findings: what is wrong, on which evidence, why probably, and what to do. Pure.

A finding's texts are in ``texts.toml``. When it holds say the conditions of its module; of each group of these the
first that holds is taken. Modules: ``finding`` puts the two together; ``peers`` has those about who answered, ``flow``
about what came, ``stalls`` about what a stall showed, ``logs`` about a receiver's log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zmq_datasource.workbench.doctor.facts import Durable, Examined, Expected
from zmq_datasource.workbench.doctor.findings.finding import Finding, Severity, find
from zmq_datasource.workbench.doctor.findings.flow import CONNECTION, TRAFFIC, FlowCase
from zmq_datasource.workbench.doctor.findings.logs import LOGS, LogCase
from zmq_datasource.workbench.doctor.findings.peers import PEERS, PeerCase
from zmq_datasource.workbench.doctor.findings.stalls import CHAIN, STALLS, StallCase, chains

__all__ = ["CONDITIONS", "EXIT_CODES", "Finding", "Severity", "diagnose", "exit_code"]

# What a script gets for the worst finding. 2 is click's, for wrong arguments.
EXIT_CODES = {Severity.NOTE: 0, Severity.WARNING: 1, Severity.UNREACHABLE: 3}
CONDITIONS = (*PEERS, *CONNECTION, *TRAFFIC, *STALLS, *CHAIN, *LOGS)


def diagnose(examined: Sequence[Examined], log: Durable | None, expected: Expected) -> list[Finding]:
    """All findings, the worst first."""
    found: list[Finding] = []
    for one in examined:
        found += _of_endpoint(one, expected)
    for chain in chains(examined):
        found += find(CHAIN, chain)
    if log is not None:
        found += find(LOGS, LogCase(log, expected))
    return sorted(found, key=lambda finding: -EXIT_CODES[finding.severity])


def _of_endpoint(one: Examined, expected: Expected) -> Iterator[Finding]:
    if one.handshake.state != "succeeded":
        yield from find(PEERS, PeerCase(one))
    else:
        flow = FlowCase(one, expected)
        yield from find(CONNECTION, flow)
        if one.traffic is not None:
            yield from find(TRAFFIC, flow)
    if one.stalled is not None:
        yield from find(STALLS, StallCase(one, one.stalled, expected))


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if nothing is wrong, 1 if something is, 3 if an endpoint could not be examined."""
    return max((EXIT_CODES[finding.severity] for finding in findings), default=0)
