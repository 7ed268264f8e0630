"""The offset of a query: for each log partition, the id of the next message to read.

Ranges are half-open: a batch from ``next=5`` to ``next=8`` holds the ids 5, 6 and 7. Spark
compares offsets as JSON text, so ``to_json`` has one text for one offset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zmq_datasource.errors import OptionError

__all__ = ["READER_PATTERN", "Offset"]

# It becomes the name of a file.
READER_PATTERN = "^[A-Za-z0-9_-]{1,64}$"

_EXAMPLE = '{"log": "<log id>", "next": {"0": 1234}}'


@dataclass(frozen=True)
class Offset:
    """A position in one log.

    Attributes:
        log: The log's id; None (only in a user's ``startingOffsets``) means any log.
        next: By log partition, the first id that was not read yet.
        reader: Under which name the query's position is kept with the log. A query that was given none has it from
            here, because its checkpoint is all that tells it from another one; None before it has one.
    """

    log: str | None
    next: Mapping[int, int]
    reader: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data whose JSON text is canonical: sorted keys, whole numbers, no counters."""
        by_partition = {str(p): self.next[p] for p in sorted(self.next)}
        reader = {} if self.reader is None else {"reader": self.reader}
        return {"log": self.log, "next": by_partition, **reader}

    @classmethod
    def from_json(cls, data: object) -> Offset:
        """Read what ``to_json`` wrote, or what a user typed.

        Raises:
            OptionError: The data is no offset.
        """
        if isinstance(data, str):
            try:
                data = json.loads(data)
            except (ValueError, RecursionError) as e:
                raise OptionError(f"reading offset {data!r}: {e}; it looks like {_EXAMPLE}") from e
        match data:
            case {"next": {**nexts}, **rest} if nexts and set(rest) <= {"log", "reader"}:
                pass
            case _:
                raise OptionError(f"reading offset {data!r}: it must look like {_EXAMPLE}")
        log, reader = rest.get("log"), rest.get("reader")
        if not (log is None or isinstance(log, str)):
            raise OptionError(f"reading offset {data!r}: the log id must be text")
        if not (reader is None or (isinstance(reader, str) and re.fullmatch(READER_PATTERN, reader))):
            raise OptionError(f"reading offset {data!r}: {reader!r} is no name of a reader")
        parsed: dict[int, int] = {}
        for partition, next_id in nexts.items():
            if not (isinstance(partition, str) and re.fullmatch("[0-9]{1,9}", partition)):
                raise OptionError(f"reading offset {data!r}: {partition!r} is no log partition")
            if not isinstance(next_id, int) or isinstance(next_id, bool) or not 0 <= next_id < 2**63:
                raise OptionError(f"reading offset {data!r}: {next_id!r} is no message id")
            parsed[int(partition)] = next_id
        return cls(log, parsed, reader)
