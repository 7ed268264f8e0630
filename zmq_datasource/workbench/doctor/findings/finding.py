"""What a finding is."""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = ["Finding", "Severity"]


class Severity(StrEnum):
    """How bad it is.

    ``unreachable``: the endpoint could not be examined. ``warning``: messages are lost, or will be, or
    something is not as it was said to be. ``note``: worth knowing, and no fault.
    """

    UNREACHABLE = "unreachable"
    WARNING = "warning"
    NOTE = "note"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was found.

    Attributes:
        id: Stable, for scripts.
        endpoint: Whose; empty for the log.
        what: In one sentence.
        evidence: The figures it rests on.
        cause: What probably makes it so; where that cannot be told from outside, it says so.
        fix: What to do, or how to find out.
    """

    id: str
    severity: Severity
    endpoint: str
    what: str
    evidence: str
    cause: str
    fix: str
