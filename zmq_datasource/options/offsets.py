"""The offset of a query: for each log partition, the id of the next message to read.

Ranges are half-open: a batch from ``next=5`` to ``next=8`` holds the ids 5, 6 and 7. Spark
compares offsets as JSON text, so ``to_json`` has one text for one offset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zmq_datasource.errors import OptionError

__all__ = ["Offset"]

_EXAMPLE = '{"log": "<log id>", "next": {"0": 1234}}'


@dataclass(frozen=True)
class Offset:
    """A position in one log.

    Attributes:
        log: The log's id; None (only in a user's ``startingOffsets``) means any log.
        next: By log partition, the first id that was not read yet.
    """

    log: str | None
    next: Mapping[int, int]

    def to_json(self) -> dict[str, Any]:
        """Plain data whose JSON text is canonical: sorted keys, whole numbers, no counters."""
        by_partition = {str(p): self.next[p] for p in sorted(self.next)}
        return {"log": self.log, "next": by_partition}

    @classmethod
    def from_json(cls, data: object) -> Offset:
        """Read what ``to_json`` wrote, or what a user typed.

        Raises:
            OptionError: The data is no offset.
        """
        if isinstance(data, str):
            try:
                data = json.loads(data)
            except json.JSONDecodeError as e:
                raise OptionError(f"reading offset {data!r}: {e}; it looks like {_EXAMPLE}") from e
        match data:
            case {"next": {**nexts}, **rest} if nexts and set(rest) <= {"log"}:
                pass
            case _:
                raise OptionError(f"reading offset {data!r}: it must look like {_EXAMPLE}")
        log = rest.get("log")
        if not (log is None or isinstance(log, str)):
            raise OptionError(f"reading offset {data!r}: the log id must be text")
        parsed: dict[int, int] = {}
        for partition, next_id in nexts.items():
            if not (isinstance(partition, str) and partition.isascii() and partition.isdecimal()):
                raise OptionError(f"reading offset {data!r}: {partition!r} is no log partition")
            if not isinstance(next_id, int) or isinstance(next_id, bool) or next_id < 0:
                raise OptionError(f"reading offset {data!r}: {next_id!r} is no message id")
            parsed[int(partition)] = next_id
        return cls(log, parsed)
