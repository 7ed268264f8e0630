"""What a finding is, and how it is made of a case: of the first condition that holds, and the texts of its id."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import resources
from typing import Any, TypeAlias

import msgspec

__all__ = ["Case", "Conditions", "Finding", "Severity", "find", "texts"]


class Severity(StrEnum):
    """How serious a finding is.

    ``unreachable``: the endpoint could not be examined. ``warning``: messages are lost, or will be, or
    something is not as it was said to be. ``note``: worth knowing, and no fault.
    """

    UNREACHABLE = "unreachable"
    WARNING = "warning"
    NOTE = "note"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem or fact that the doctor found.

    Attributes:
        id: Stable, for scripts.
        endpoint: Whose; empty for the log.
        what: In one sentence.
        evidence: The figures it rests on.
        cause: What probably makes it so; where that cannot be known from outside, it says so.
        fix: What to do, or how to find out.
    """

    id: str
    severity: Severity
    endpoint: str
    what: str
    evidence: str
    cause: str
    fix: str


class Case:
    """Figures under the names that conditions and texts use.

    Figures that may be missing are Any: a condition names one only where it is there.
    """

    endpoint = ""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


Conditions: TypeAlias = Sequence[Mapping[str, Callable[[Any], object]]]


@functools.cache
def texts() -> dict[str, dict[str, str]]:
    """What ``texts.toml`` says of each finding and variant."""
    texts = tomllib.loads(resources.files(__package__).joinpath("texts.toml").read_text("utf-8"))
    usual = {"severity": Severity.WARNING, "evidence": "{evidence}"}
    return {key: {**usual, **texts[key.partition("-")[0]], **texts[key]} for key in texts}


def find(conditions: Conditions, case: Case) -> Iterator[Finding]:
    """Of each group the first finding, or variant (``id-variant``), whose condition holds."""
    for group in conditions:
        key = next((key for key, holds in group.items() if holds(case)), None)
        if key is not None:
            entry = texts()[key]
            said = {name: entry[name].format_map(case) for name in ("what", "evidence", "cause", "fix")}
            severity = Severity(entry["severity"])
            yield Finding(id=key.partition("-")[0], severity=severity, endpoint=case.endpoint, **said)
