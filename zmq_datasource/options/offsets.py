"""Places in a log. The main one is the offset of a query: for each log partition, the id of the next message to read.

Ranges are half-open: a batch from ``next=5`` to ``next=8`` has the ids 5, 6 and 7. Spark compares offsets as JSON text,
so ``to_json`` has one text for one offset.

If a query crashes in its first batch, Spark asks again where the query begins. The checkpoint then has only the end
offset of that batch. So this end offset also says where the query began (``began``).

If an older copy of a log is restored and then received into, ids are given out a second time. So an offset names the
writer of the last message that was read (``writers``, see ``log.facts``). A log whose message of that id has another
writer refuses the offset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from zmq_datasource.errors import OptionError
from zmq_datasource.options.types import Timestamp

# The name of a reader becomes the name of a file.
READER_PATTERN = "^[A-Za-z0-9_-]{1,64}$"

_EXAMPLE = '{"log": "<log id>", "next": {"0": 1234}}'


@dataclass(frozen=True)
class Offset:
    """A position in one log.

    Attributes:
        log: The log's id. None means any log; only an offset that a user writes may have it.
        next: For each log partition, the id of the next message to read.
        began: For each log partition, the id where the query began. None after the end of the first batch.
        writers: The incarnation that wrote the message before ``next``, for each log partition where it is known.
    """

    log: str | None
    next: Mapping[int, int]
    began: Mapping[int, int] | None = None
    writers: Mapping[int, str] = field(default_factory=dict)

    @property
    def at_the_beginning(self) -> bool:
        """Whether the query has read nothing before this offset."""
        return self.began is not None and dict(self.began) == dict(self.next)

    def to_json(self) -> dict[str, Any]:
        """Plain data with one canonical JSON text: the partitions in order, and whole numbers."""
        data: dict[str, Any] = {"log": self.log, "next": _by_name(self.next)}
        if self.began is not None:
            data["began"] = _by_name(self.began)
        if self.writers:
            data["writers"] = {str(partition): self.writers[partition] for partition in sorted(self.writers)}
        return data

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
            case {"next": {**nexts}, **rest} if nexts and set(rest) <= {"log", "began", "writers"}:
                pass
            case {"next": _, "reader": _}:
                raise OptionError(
                    f"reading offset {data!r}: it is of a build before version 0.2.0, which wrote the reader into it. "
                    "Set another checkpointLocation; CHANGELOG.md says what to do first"
                )
            case _:
                raise OptionError(f"reading offset {data!r}: it must look like {_EXAMPLE}")
        log, began, writers = rest.get("log"), rest.get("began"), rest.get("writers", {})
        if not (log is None or isinstance(log, str)):
            raise OptionError(f"reading offset {data!r}: the log id must be text")
        if not (began is None or isinstance(began, dict)):
            raise OptionError(f"reading offset {data!r}: began must be an object, like next")
        if not (isinstance(writers, dict) and all(isinstance(name, str) for name in writers.values())):
            raise OptionError(
                f"reading offset {data!r}: writers must be an object with text for each log partition"
            )
        return cls(
            log,
            _by_number(data, nexts),
            None if began is None else _by_number(data, began),
            {_partition(data, name): writer for name, writer in writers.items()},
        )


def _by_name(ids: Mapping[int, int]) -> dict[str, int]:
    """Ids for JSON: the number of each partition as text, in order."""
    return {str(partition): ids[partition] for partition in sorted(ids)}


def _partition(data: object, name: object) -> int:
    if not (isinstance(name, str) and re.fullmatch("[0-9]{1,9}", name)):
        raise OptionError(f"reading offset {data!r}: {name!r} is no log partition")
    return int(name)


def _by_number(data: object, ids: Mapping[object, object]) -> dict[int, int]:
    """Ids from JSON, checked: the number of each partition as a number. ``data`` is the whole offset, for errors."""
    parsed: dict[int, int] = {}
    for name, message_id in ids.items():
        partition = _partition(data, name)
        if not isinstance(message_id, int) or isinstance(message_id, bool) or not 0 <= message_id < 2**63:
            raise OptionError(f"reading offset {data!r}: {message_id!r} is no message id")
        parsed[partition] = message_id
    return parsed


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
                f'a number alone can be an id or a time; write {{"next": {{"0": {text}}}}} for an id, or a time as in '
                "2026-11-22T10:00:00Z"
            )
        try:
            return cls(time=Timestamp.read(text))
        except ValueError as e:
            raise ValueError(f"it must be earliest, latest, an offset in JSON, or a time: {e}") from None
