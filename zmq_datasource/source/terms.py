"""What tells feeds apart, and on which terms a feed is received into a log.

Processes that receive the same feed may do so on other terms: keep messages for less long, or ask no publisher for what
is missing. The rules:

* The writer of a partition notes its terms beside the log. The next one compares them with its own, and logs as a
  warning which of them differ.
* A query records ``walRetention``, and whether it has a ``replayEndpoint``, with its position. While that position is
  there, its retention holds for each writer; and of the queries that run, one with a ``replayEndpoint`` receives.
"""

from __future__ import annotations

import hashlib
import json
import logging

from zmq_datasource.log import TERMS_NAME, LogStorage, ReaderTerms
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.types import Duration
from zmq_datasource.source.location import where_from

__all__ = ["compare_terms", "feed_of", "is_replayed", "terms_of"]

_log = logging.getLogger(__name__)

# Of the options of framing those by which the same message would be another row.
_ROWS_BY = (
    *("framing", "topic_delimiter", "topic_frame", "publisher_frame", "value_frame", "value_offset"),
    *(
        "sequence_frame",
        "sequence_offset",
        "sequence_width",
        "sequence_endian",
        "sequence_signed",
        "sequence_path",
    ),
    *("sequence_by", "sequence_start", "sequence_end", "sequence_restart", "sequence_window", "deduplicate"),
)
# The options that another receiver of the same feed may have set in another way, by name.
_TERMS = {
    "walRetention": "wal_retention",
    "walMaxBytes": "wal_max_bytes",
    "whenFull": "when_full",
    "replayEndpoint": "replay_endpoint",
    "onMalformed": "on_malformed",
    "maxPublishers": "max_publishers",
    "maxGaps": "max_gaps",
}


def feed_of(options: StreamReadOptions) -> str:
    """What tells feeds apart: where messages come from, and what becomes of them. One line of text."""
    framing = {name: str(getattr(options, name)) for name in _ROWS_BY}
    shared = {}
    # Whoever shares it out otherwise, also by another order, would receive some of it twice.
    if options.receivers > 1:
        shared = {
            "receivers": [options.receivers, options.receivers_by],
            "order": [*map(str, options.connect), "", *map(str, options.bind)],
        }
    text = json.dumps({**where_from(options), **framing, **shared}, sort_keys=True, separators=(",", ":"))
    return f"feed {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def terms_of(options: StreamReadOptions) -> ReaderTerms | None:
    """What a query records with its position; None if it does not receive."""
    if not (options.connect or options.bind):
        return None
    return ReaderTerms(float(options.wal_retention), bool(options.replay_endpoint))


def compare_terms(storage: LogStorage, options: StreamReadOptions) -> None:
    """Log in which terms this writer differs from the last one, and note its own; with the lock of the partition.

    Raises:
        LogError: The note cannot be read or written.
    """
    ours = {name: _text(getattr(options, attribute)) for name, attribute in _TERMS.items()}
    theirs = storage.read_json(storage.key(TERMS_NAME))
    if theirs == ours:
        return
    if isinstance(theirs, dict):
        _log.warning(
            "%s was last received with other options; those of this process apply: %s",
            storage,
            ", ".join(
                f"{name}={ours[name]} (before: {theirs[name]})"
                for name in ours
                if name in theirs and theirs[name] != ours[name]
            ),
        )
    storage.write_json(storage.key(TERMS_NAME), ours)


def _text(value: object) -> str:
    return f"{value:g}s" if isinstance(value, Duration) else str(value)


def is_replayed(storage: LogStorage) -> bool:
    """Whether the last writer of a partition asks publishers for what is missing.

    Raises:
        LogError: The note cannot be read.
    """
    match storage.read_json(storage.key(TERMS_NAME)):
        case {"replayEndpoint": str(endpoints)}:
            return bool(endpoints)
    return False
