"""Turn raw messages into rows: framing, tracking of sequences, deduplication. Pure: it does no I/O.

The log stores the state of an ``Intake`` with each chunk; ``facts`` reads that state without an ``Intake``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from zmq_datasource.counters import SourceCounters
from zmq_datasource.log import CarriedState
from zmq_datasource.messages.columns import binary_of, number
from zmq_datasource.messages.framing import Fields, LayoutFraming, decode_plain, make_batch
from zmq_datasource.messages.framing.replay import Reply
from zmq_datasource.messages.raw import RawMessages, raw_of
from zmq_datasource.options import FramingOptions
from zmq_datasource.sequences import (
    Key,
    Keys,
    Run,
    SequenceFindings,
    SequenceTracker,
    runs_of,
    state,
)
from zmq_datasource.source.facts import saved_sequences


class Arrival(NamedTuple):
    """Messages that were received together from one endpoint.

    Attributes:
        timestamp: When, in microseconds since the epoch.
        messages: How many.
        connection: The number of the connection, from 1; 0 if connections are not counted.
    """

    timestamp: int
    messages: int
    endpoint: str
    connection: int = 0


class MalformedMessage(NamedTuple):
    """Why a message does not fit its framing, and where it was received."""

    reason: str
    endpoint: str


@dataclass
class Findings(SequenceFindings):
    """What is logged, or ends receiving: losses, restarts, and messages that do not fit."""

    malformed: list[MalformedMessage] = field(default_factory=list)

    def add(self, tracked: SequenceFindings) -> None:
        self.lost += tracked.lost
        self.restarts += tracked.restarts


class Intake(CarriedState):
    """Turns the messages of one feed into rows, and tracks their sequences.

    Args:
        options: The framing, and how messages are numbered.

    Attributes:
        tracker: Tracks the sequences; None if messages are not numbered.
    """

    def __init__(self, options: FramingOptions, counters: SourceCounters) -> None:
        super().__init__(counters)
        self._options = options
        self._framing = None if options.layout is None else LayoutFraming(options.layout)
        numbering = options.numbering
        self.tracker = None if numbering is None else SequenceTracker(numbering, options.max_publishers)

    def read(self, raw: RawMessages, arrivals: Sequence[Arrival]) -> tuple[pa.RecordBatch, Findings]:
        """Turn one message or more of the live flow into rows.

        Args:
            arrivals: When and where the messages were received, in their order.

        Returns:
            A batch with ``messages.columns.MESSAGE_SCHEMA``, and the findings.
        """
        findings = Findings()
        if self._options.topic_delimiter is not None:
            raw = raw.split_topics(self._options.topic_delimiter)
        timestamps = [(arrival.timestamp, arrival.messages) for arrival in arrivals]
        if self._framing is None:
            batch = decode_plain(raw, timestamps)
        else:
            fields = self._framing.decode(raw)
            origin = _origins(arrivals)
            self._note_malformed(fields, origin, findings)
            if self.tracker is not None:
                fields = self._track(self.tracker, fields, arrivals, origin, findings)
            keep = self._options.on_malformed == "keep"
            batch = make_batch(
                self._options.framing, fields, raw, timestamps, self._endpoints(arrivals), keep_malformed=keep
            )
        self._count(batch)
        return batch, findings

    def _note_malformed(self, fields: Fields, origin: Callable[[int], Arrival], findings: Findings) -> None:
        self.counters.control += fields.skipped + len(fields.announced)
        self.counters.malformed += len(fields.malformed)
        findings.malformed += [
            MalformedMessage(reason, origin(row).endpoint) for row, reason in fields.malformed
        ]

    def _track(
        self,
        tracker: SequenceTracker,
        fields: Fields,
        arrivals: Sequence[Arrival],
        origin: Callable[[int], Arrival],
        findings: Findings,
    ) -> Fields:
        for arrival in arrivals:
            tracker.connections[arrival.endpoint.encode()] = arrival.connection
        if fields.sequences is not None and len(fields):
            runs = runs_of(_keys(tracker.numbering.by, fields, arrivals), fields.sequences)
            tracked = tracker.track(runs, lambda at: origin(fields.row(at)).timestamp)
            findings.add(tracked)
            if self._options.replay_endpoint and fields.topics is not None:
                self._note_topics(tracker, runs, fields)
            if tracked.duplicates and (self._options.deduplicate or tracker.numbering.replayed):
                fields = fields.without(tracked.duplicates)
        for row, topic, publisher, last, end in fields.announced:
            arrival = origin(row)
            parts = {
                "topic": topic or b"",
                "publisher": publisher or b"",
                "endpoint": arrival.endpoint.encode(),
            }
            key = tuple(_bounded(parts[name]) for name in tracker.numbering.by)
            findings.add(tracker.announce(key if len(key) > 1 else key[0], last, arrival.timestamp, end=end))
        return fields

    def _note_topics(self, tracker: SequenceTracker, runs: Sequence[Run], fields: Fields) -> None:
        """Keep the topic of each endpoint, for replies that repeat none."""
        assert fields.topics is not None
        for key, run in {run.key: run for run in runs}.items():  # the last run of each counter
            counter = tracker.counters.get(key)
            if counter is not None:  # the tracker may have forgotten it
                counter.topic = fields.topics[run.place(run.count - 1)].as_py()

    def read_replies(self, replies: Sequence[Reply], arrival: Arrival) -> tuple[pa.RecordBatch, Findings]:
        """Turn replayed messages into rows, without those that were received before.

        Args:
            arrival: When the replies were received, and the endpoint of the publisher's live messages.

        Returns:
            As ``read``.
        """
        assert self.tracker is not None, "a replay needs numbered messages"
        assert self._framing is not None
        tracked = Findings()
        key = arrival.endpoint.encode()
        timestamp = arrival.timestamp
        self.tracker.connections[key] = arrival.connection
        kept = [
            reply for reply in replies if self.tracker.track_replayed(key, reply.sequence, timestamp, tracked)
        ]
        counter = self.tracker.counters.get(key)
        known = (
            b"" if counter is None or counter.topic is None else counter.topic
        )  # older vLLMs repeat no topic
        raw = raw_of(
            [
                [
                    known if reply.topic is None else reply.topic,
                    reply.sequence.to_bytes(8, "big"),
                    reply.value,
                ]
                for reply in kept
            ]
        )
        origins = self._endpoints([arrival._replace(messages=len(kept))])
        fields = self._framing.decode(raw)
        batch = make_batch(self._options.framing, fields, raw, [(timestamp, len(kept))], origins)
        self.counters.replayed += len(kept)
        self._count(batch)
        return batch, tracked

    def _endpoints(self, arrivals: Sequence[Arrival]) -> list[tuple[str, int]] | None:
        """The publishers of messages that name none: runs of (endpoint, number of messages).

        None if messages are not counted by endpoint.
        """
        if self.tracker is None or "endpoint" not in self.tracker.numbering.by:
            return None
        return [(arrival.endpoint, arrival.messages) for arrival in arrivals]

    def _count(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            # Without a value in the batch, Arrow's sum is null.
            size = pc.sum(pc.binary_length(batch.column("value"))).as_py() or 0
            self.counters.count(batch.num_rows, size)

    # log.CarriedState

    def _sections(self) -> dict[str, Any]:
        return {} if self.tracker is None else {"sequences": state.save(self.tracker)}

    def _restore(self, sections: Mapping[str, msgspec.Raw]) -> None:
        """Restore the tracker, unless the saved numbers have another meaning now."""
        kept = saved_sequences(sections)
        if self.tracker is not None and kept is not None and self.tracker.numbering.is_like(kept.numbering):
            state.restore(self.tracker, kept)


def _origins(arrivals: Sequence[Arrival]) -> Callable[[int], Arrival]:
    """Make a function that finds the arrival of a message by its position."""
    ends = list(accumulate(arrival.messages for arrival in arrivals))
    return lambda row: arrivals[bisect_right(ends, row)]


# A longer name is cut and gets a digest, so that the memory for a counter is bounded.
_MOST_NAME_BYTES = 256


def _bounded(name: Key) -> bytes:
    assert isinstance(name, bytes)
    if len(name) <= _MOST_NAME_BYTES:
        return name
    return name[: _MOST_NAME_BYTES - 32] + xxhash.xxh3_128_hexdigest(name).encode()


def _keys(by: Sequence[str], fields: Fields, arrivals: Sequence[Arrival]) -> Keys:
    parts: list[Keys] = []
    for name in by:
        if name == "endpoint":
            parts.append(_keys_by_endpoint(fields, arrivals))
        else:
            column = fields.publishers if name == "publisher" else fields.topics
            assert column is not None
            keys = Keys.of(column.fill_null(binary_of([b""])[0]) if column.null_count else column)
            parts.append(Keys([_bounded(each) for each in keys.names], keys.codes))
    return parts[0] if len(parts) == 1 else Keys.joined(parts)


def _keys_by_endpoint(fields: Fields, arrivals: Sequence[Arrival]) -> Keys:
    names = list(dict.fromkeys(arrival.endpoint.encode() for arrival in arrivals))
    if len(names) == 1:
        return Keys(names)
    codes = {name: number(code) for code, name in enumerate(names)}
    return Keys(
        names,
        fields.of(
            pa.concat_arrays(
                [pa.repeat(codes[arrival.endpoint.encode()], arrival.messages) for arrival in arrivals]
            )
        ),
    )
