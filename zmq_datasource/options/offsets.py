"""Places in a log. The main one is the offset of a query: the log, and the id of the next message to read.

Ranges are half-open: a batch from ``next=5`` to ``next=8`` has the ids 5, 6 and 7. Spark compares offsets as JSON text,
so ``to_json`` has one text for one offset.

If a query crashes in its first batch, Spark asks again where the query begins. The checkpoint then has only the end
offset of that batch. So this end offset also says where the query began (``began``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from zmq_datasource.errors import OptionError
from zmq_datasource.options.types import Timestamp

# The name of a reader becomes the name of a file.
READER_PATTERN = "^[A-Za-z0-9_-]{1,64}$"

_EXAMPLE = '{"log": "<log id>", "next": 1234}'


@dataclass(frozen=True)
class Offset:
    """A position in one log.

    Attributes:
        log: The log's id. None means any log; only an offset that a user writes may have it.
        next: The id of the next message to read.
        began: The id where the query began. None after the end of the first batch.
    """

    log: str | None
    next: int
    began: int | None = None

    @property
    def at_the_beginning(self) -> bool:
        """Whether the query has read nothing before this offset."""
        return self.began == self.next

    def to_json(self) -> dict[str, Any]:
        """Plain data with one canonical JSON text."""
        data: dict[str, Any] = {"log": self.log, "next": self.next}
        return data if self.began is None else data | {"began": self.began}

    @classmethod
    def from_json(cls, data: object) -> Offset:
        """Read an offset from the data of ``to_json``, or from the same data as JSON text, as a user writes it.

        Raises:
            OptionError: The data is no offset.
        """
        if isinstance(data, str):
            try:
                data = json.loads(data)
            except (ValueError, RecursionError) as e:
                raise OptionError(f"reading offset {data!r}: {e}; an offset looks like {_EXAMPLE}") from None
        match data:
            case {"next": next_id, **rest} if set(rest) <= {"log", "began"}:
                pass
            case _:
                raise OptionError(f"reading offset {data!r}: it must look like {_EXAMPLE}")
        log, began = rest.get("log"), rest.get("began")
        if not (log is None or isinstance(log, str)):
            raise OptionError(f"reading offset {data!r}: the log id must be text")
        return cls(log, _id(data, next_id), None if began is None else _id(data, began))


def _id(data: object, found: object) -> int:
    """An id from JSON, checked. ``data`` is the whole offset, for errors."""
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < 2**63:
        raise OptionError(f"reading offset {data!r}: {found!r} is no message id")
    return found


@dataclass(frozen=True)
class Place:
    """A place in a log: ``earliest``, ``latest``, an offset, or the first message since a time. One of these is set."""

    words: ClassVar[str] = "an offset or a time"

    word: str | None = None
    offset: Offset | None = None
    time: Timestamp | None = None

    def __str__(self) -> str:
        if self.time is not None:
            return str(self.time)
        return self.word or json.dumps(self.offset.to_json() if self.offset else None)

    @classmethod
    def read(cls, text: str) -> Place:
        if text.lower() in ("earliest", "latest"):
            return cls(text.lower())
        if text.startswith("{"):
            return cls(offset=Offset.from_json(text))
        if text.isdecimal():  # also a date, as in 20261122
            raise ValueError(
                f'a number alone can be an id or a time; write {{"next": {text}}} for an id, or a time as in '
                "2026-11-22T10:00:00Z"
            )
        try:
            return cls(time=Timestamp.read(text))
        except ValueError as e:
            raise ValueError(f"it must be earliest, latest, an offset in JSON, or a time: {e}") from None
