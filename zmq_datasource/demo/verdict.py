"""What the demo's table says, in words, each sentence checked against the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zmq_datasource.demo.counts import QueryCounts

__all__ = ["Finding", "findings"]


@dataclass(frozen=True)
class Finding:
    """One sentence; ``good`` is whether it is as it should be (None: neither good nor bad)."""

    good: bool | None
    text: str


def findings(
    accounts: Sequence[QueryCounts], *, pull: bool, settled: bool, slow_settings: str
) -> Iterator[Finding]:
    """Go through the table from left to right."""
    if not settled:
        yield Finding(
            None,
            "This machine is too busy: Spark did not get to the end of what was published. The numbers of a query are "
            "those of its last finished micro-batch.",
        )
    elif any(a.published is None for a in accounts):
        yield _foreign_feed(pull)
    else:
        yield _network(accounts)
    yield from _log(accounts)
    for account in accounts:
        yield from _sink(account, slow_settings)


def _foreign_feed(pull: bool) -> Finding:
    if pull:
        return Finding(
            None, "A PUSH shares its messages among its PULL peers: each query got its part of the feed."
        )
    return Finding(
        None,
        "What your publisher sent, and may have dropped before a source was there or while its queue was full, cannot "
        "be known from here: a PUB drops without telling anybody.",
    )


def _network(accounts: Sequence[QueryCounts]) -> Finding:
    lost = {a.name: (a.published or 0) - a.received for a in accounts}
    note = "The publisher began when every source had subscribed, so nothing was published too early to be received."
    if any(lost.values()):
        what = ", ".join(f"{n:,} ({name})" for name, n in lost.items() if n)
        return Finding(
            None, f"Lost on the way from PUB to SUB, dropped at the publisher's queue: {what}. {note}"
        )
    return Finding(True, f"published = received: PUB/SUB lost nothing on the way. {note}")


def _log(accounts: Sequence[QueryCounts]) -> Iterator[Finding]:
    behind = {a.name: a.received - a.rows for a in accounts}
    if not any(behind.values()):
        yield Finding(True, "received = rows: every message taken from a socket was one row, once.")
        return
    what = ", ".join(f"{n:,} ({name})" for name, n in behind.items() if n)
    yield Finding(
        None, f"Received, and still in the log when the query was stopped, for its next run: {what}."
    )


def _sink(account: QueryCounts, slow_settings: str) -> Iterator[Finding]:
    sink, arrived = account.sink, account.arrived
    if sink is None or arrived is None:
        return
    dropped = sink.dropped.total()
    yield Finding(
        sink.balanced and sink.rows == account.rows,
        f"{account.name}: rows = sent + dropped: {account.rows:,} = {sink.sent:,} + {dropped:,}.",
    )
    if sink.dropped["hwm"]:
        yield Finding(
            None,
            f"{account.name}: {sink.dropped['hwm']:,} rows found the queue full and were dropped and counted, as asked "
            f"for ({slow_settings}). With noblock=false, the default, it waits for its consumer instead.",
        )
    if arrived == sink.sent:
        yield Finding(True, f"{account.name}: sent = arrived: {arrived:,}.")
    elif arrived > sink.sent:
        yield Finding(
            None,
            f"{account.name}: {arrived - sink.sent:,} more arrived than were counted: a micro-batch was cut off "
            "before its commit, and Spark would send it again.",
        )
    else:
        yield Finding(
            False,
            f"{account.name}: {sink.sent - arrived:,} messages were sent and did not arrive: accepted by a PUSH is "
            "not delivered.",
        )
