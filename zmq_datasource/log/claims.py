"""Who wrote which ids of a log partition in object storage, where there is neither a lock nor a rename.

A writer *claims* the partition: it puts an object whose name is higher than that of every claim there is. Then it
lists what there is, and *confirms* its claim with the id from which on it writes, and with the claim that it succeeds.
A chunk has its writer's claim in its key. The rules:

* After each chunk it has put, and before it counts as durable, a writer lists the claims. If there is a higher one, it
  has lost the partition, and what it has put does not count.
* Until a claim is confirmed, the newest chunk does not count for readers, unless it counted already. One that begins
  waits for the confirmation.
* The highest confirmed claim, the one that it succeeds, and so on, are the *succession*. Each wrote the ids from its
  own first one to that of the next. An object that does not fit into that is the trace of a writer that had lost the
  partition and did not know yet: nobody reads it, and the next writer deletes it.

So no id has two chunks, whatever stalls where: either the old writer's listing shows the new claim, or the new writer's
listing, which comes later, shows the old one's chunk.
"""

from __future__ import annotations

import re
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

__all__ = ["NO_CLAIM", "Confirmed", "Succession", "new_claim"]

# What the first writer succeeds. Claims are compared as text.
NO_CLAIM = "0000000000-0000000000000000"
_CLAIM = r"[0-9]{10}-[0-9a-f]{16}"
_CLAIM_KEY = re.compile(rf"({_CLAIM})\.json")
_CONFIRMED_KEY = re.compile(rf"({_CLAIM})\.({_CLAIM})\.([0-9]{{20}})\.json")


def new_claim(highest: str) -> str:
    """A claim that is higher than this one, and than all that are not higher than it."""
    return f"{int(highest.partition('-')[0]) + 1:010d}-{uuid.uuid4().hex[:16]}"


class Confirmed(NamedTuple):
    """A claim that counts.

    Attributes:
        claim: Its name.
        before: The claim that it succeeds.
        first: The first id of its writer.
    """

    claim: str
    before: str
    first: int

    @property
    def key(self) -> str:
        return f"{self.claim}.{self.before}.{self.first:020d}.json"

    @classmethod
    def of_key(cls, key: str) -> Self | None:
        match = _CONFIRMED_KEY.fullmatch(key)
        return None if match is None else cls(match[1], match[2], int(match[3]))


class Succession:
    """What the keys of a partition's claims say.

    Args:
        keys: Of all claims, confirmed or not; others are ignored.

    Attributes:
        highest: The highest claim, confirmed or not; ``NO_CLAIM`` without one.
        writers: The confirmed claims that count, in their order.
        is_settled: Whether nobody has claimed the partition who has not confirmed it yet. If somebody has, the newest
            chunk may count or not: that one's first id will tell. Those before it count, for their writer has made sure
            after each of them that it was still the writer.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        confirmed = {found.claim: found for key in keys if (found := Confirmed.of_key(key))}
        claims = [match[1] for key in keys if (match := _CLAIM_KEY.fullmatch(key))]
        self.highest = max([*claims, *confirmed], default=NO_CLAIM)
        writers: list[Confirmed] = []
        claim = max(confirmed, default=NO_CLAIM)
        while (found := confirmed.pop(claim, None)) is not None:
            writers.append(found)
            claim = found.before
        self.writers: Sequence[Confirmed] = writers[::-1]
        self._firsts = [writer.first for writer in self.writers]
        self.is_settled = self.highest == self.newest

    @property
    def newest(self) -> str:
        """The claim of the last writer; ``NO_CLAIM`` without one."""
        return self.writers[-1].claim if self.writers else NO_CLAIM

    def writer_of(self, first: int) -> str | None:
        """Whose chunk begins at this id."""
        place = bisect_right(self._firsts, first)
        return self.writers[place - 1].claim if place else None

    def needed(self, earliest: int) -> set[str]:
        """The keys without which nobody could say who wrote the ids from ``earliest`` on."""
        place = max(0, bisect_right(self._firsts, earliest) - 1)
        return {key for writer in self.writers[place:] for key in (writer.key, f"{writer.claim}.json")}
