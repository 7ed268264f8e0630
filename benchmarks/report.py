"""Results for machines (``results.json``) and for people (``RESULTS.md``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.measure import Measurement
from benchmarks.metrics import BARE, EMPTY_LISTENER, LISTENER, METERED
from benchmarks.proxy import FORWARDING, JOURNALING, JOURNALING_PLAIN, UNSYNCED_JOURNAL
from benchmarks.sequences import RECEIVER_JUDGED, RECEIVER_PLAIN, SPARK_JUDGED, SPARK_PLAIN
from benchmarks.sink import BATCH, STREAM
from benchmarks.source import DURABLE, RAW, TUTORIAL, UNSYNCED
from benchmarks.transactions import ACKNOWLEDGED, PARQUET, PLAIN

__all__ = ["write_results"]

_TITLES = {
    "source": (
        "Source throughput",
        "Messages a second, from the first message sent to the last row counted by Spark (`noop` sink, PULL "
        "over tcp loopback, high-water marks of 1000). The sender is a blocking pyzmq loop in a process of "
        f"its own, the same for all. *{RAW}*: a `recv()` loop, no Spark. *{TUTORIAL}*: a "
        "`SimpleDataSourceStreamReader` with a list in memory, nothing durable, at most 10,000 messages or "
        f"64 MiB a batch. *{DURABLE}*: this package as it is by default, every chunk forced to the disk.",
    ),
    "sequences": (
        "The cost of judging sequences",
        "Messages a second of 100 bytes of payload, the same on the wire for all columns of a row: read with "
        "`framing=plain`, and with the framing that finds their numbers and judges them, with `deduplicate`. *Spark*: "
        "as source throughput, log and all; *receiver*: the receiving thread alone, from the socket to Arrow, by "
        "its own time. Target: "
        "judged at least 0.7 of plain.",
    ),
    "sink": (
        "Sink throughput",
        "Messages a second that a PULL loop receives, between its first and its last message; *whole job* "
        "counts all of Spark's job, from the call to its return. One Spark partition, a blocking PUSH. "
        f"*{BATCH}* sends a cached DataFrame, *{STREAM}* a Parquet file.",
    ),
    "transactions": (
        "Transactions",
        "Rows of 100 bytes a second, from `df.write` of a cached DataFrame in two partitions until all are on disk. "
        f"*{ACKNOWLEDGED}*: one transaction, staged, committed and acknowledged, into the log of a receiver process; "
        f"*{PLAIN}*: plain messages into the same kind of log; *{PARQUET}*: `df.write.parquet`, in the same JVM (most "
        "of whose bytes its encoding saves). Target: a million rows a second.",
    ),
    "metrics": (
        "The cost of metrics",
        "Messages a second of 100 bytes, as source throughput and as sink throughput (whole job of a stream). "
        f"*{BARE}*: nothing is shown, no accumulator, no files. *{METERED}*: a report at each trigger, files at "
        f"`metricsLocation`, an accumulator. *{LISTENER}*: a callback and Prometheus too, beside *{EMPTY_LISTENER}*, "
        "because PySpark itself works some 20 ms for each event of a listener in Python. There is a batch as soon as "
        "there is data. Target: at least 0.97.",
    ),
    "proxy": (
        "The journaling proxy",
        "From a publisher (XPUB) over a proxy to a subscriber, each a process of its own, tcp loopback, marks of "
        "10,000, nobody drops: messages of topic and value a second, as fast as it goes, and how long one takes at a "
        f"thousand a second. *{FORWARDING}*: libzmq's own, XSUB to XPUB, which writes nothing. *{UNSYNCED_JOURNAL}*: "
        "ours, to the system's cache before it is published, with its id; "
        f"*{JOURNALING}*: forced to the disk before; *{JOURNALING_PLAIN}*: not forced, and without ids, so that the "
        "same frames go out. A log of 256 MiB. Target: half of libzmq's rate at 100 B, 0.8 of it at 10 kB.",
    ),
    "memory": (
        "Memory",
        "Resident memory of Spark's source runner, the Python process that receives, while a backlog of 2 GB "
        "times the scale builds up that Spark does not read. Target: below 500 MB.",
    ),
    "planning": (
        "Planning",
        "Time of one call on the driver, for a micro-batch of the five newest chunks, by the length of the "
        "log. Target: about the same.",
    ),
}
_RATIOS = {
    "source": ((DURABLE, TUTORIAL), (UNSYNCED, TUTORIAL), (DURABLE, RAW), (UNSYNCED, RAW)),
    "sequences": ((SPARK_JUDGED, SPARK_PLAIN), (RECEIVER_JUDGED, RECEIVER_PLAIN)),
    "sink": ((BATCH, RAW), (STREAM, RAW)),
    "metrics": ((METERED, BARE), (LISTENER, EMPTY_LISTENER)),
    "proxy": (
        (UNSYNCED_JOURNAL, FORWARDING),
        (JOURNALING, FORWARDING),
        (JOURNALING_PLAIN, FORWARDING),
    ),
    "transactions": ((ACKNOWLEDGED, PLAIN), (ACKNOWLEDGED, PARQUET)),
}


def write_results(directory: Path, machine: Mapping[str, str], measured: Sequence[Measurement]) -> None:
    """Write both files; sections that were not measured this time stay as they were."""
    sections = {m.section for m in measured}
    measured = [*(m for m in _before(directory) if m.section not in sections), *measured]
    results = {
        "machine": machine,
        "measurements": [
            {
                "section": m.section,
                "case": m.case,
                "method": m.method,
                "unit": m.unit,
                "median": m.median,
                "min": min(m.values),
                "max": max(m.values),
                "values": m.values,
                "scale": m.scale,
            }
            for m in measured
        ],
    }
    text = json.dumps(results, indent=2, ensure_ascii=False)
    (directory / "results.json").write_text(text + "\n", encoding="utf-8")
    (directory / "RESULTS.md").write_text("\n".join(_lines(machine, measured)) + "\n", encoding="utf-8")


def _before(directory: Path) -> list[Measurement]:
    path = directory / "results.json"
    if not path.exists():
        return []
    known = json.loads(path.read_text(encoding="utf-8"))["measurements"]
    return [
        Measurement(m["section"], m["case"], m["method"], m["unit"], tuple(m["values"]), m["scale"])
        for m in known
    ]


def _lines(machine: Mapping[str, str], measured: Sequence[Measurement]) -> Iterator[str]:
    yield "# Benchmark results"
    yield ""
    yield "Written by `python -m benchmarks`: medians, with least and most in brackets."
    yield ""
    yield from _table(("machine", ""), machine.items())
    for section, (title, explanation) in _TITLES.items():
        mine = [m for m in measured if m.section == section]
        if mine:
            yield f"## {title}"
            yield ""
            yield f"{explanation} Scale {mine[0].scale:g}."
            yield ""
            yield from _section(mine, _RATIOS.get(section, ()))


def _section(measured: Sequence[Measurement], ratios: Sequence[tuple[str, str]]) -> Iterator[str]:
    by_case: dict[str, dict[str, Measurement]] = {}
    for m in measured:
        by_case.setdefault(m.case, {})[m.method] = m
    methods = list(dict.fromkeys(m.method for m in measured))
    unit = measured[0].unit
    yield from _table(
        ["", *(f"{method} ({unit})" if unit else method for method in methods)],
        ([case, *(_shown(row[method]) for method in methods)] for case, row in by_case.items()),
    )
    if ratios:
        yield from _table(
            ["ratio", *(f"{ours} / {other}" for ours, other in ratios)],
            (
                [case, *(f"{row[ours].median / row[other].median:.2f}" for ours, other in ratios)]
                for case, row in by_case.items()
            ),
        )


def _shown(measurement: Measurement) -> str:
    values = measurement.values
    median = f"{measurement.median:,.0f}"
    return median if len(values) == 1 else f"{median} ({min(values):,.0f}–{max(values):,.0f})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(header)
    yield _row(["---"] * len(header))
    yield from map(_row, rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
