"""The receiver as a program of its own: what ``zmq-datasource receive`` runs."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Mapping

from zmq_datasource.errors import LogError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.locations import check_location
from zmq_datasource.monitoring.source import SourceMonitor
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.ingest import Ingest

__all__ = ["receive_until_stopped"]

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
_REPORT_SECONDS = 10.0
_FULL_SECONDS = 60.0


def receive_until_stopped(options: Mapping[str, str]) -> None:
    """Receive into a log until SIGTERM or SIGINT, then drain the socket and end.

    Raises:
        ZmqDataSourceError: The options, the socket or the log.
    """
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parsed = parse(StreamReadOptions, options)
    check_location("deadLetterLocation", parsed.dead_letter_location)
    check_location("metricsLocation", parsed.metrics_location, reach=False)
    ingest = Ingest(parsed)
    stop = threading.Event()
    before = [(s, signal.signal(s, lambda *_: stop.set())) for s in (signal.SIGTERM, signal.SIGINT)]
    try:
        if not _become_writer(ingest, stop):
            return
        ingest.start()
        monitor = SourceMonitor(ingest, parsed)
        monitor.start()
        try:
            _report_until(stop, ingest, monitor)
        finally:
            ingest.stop()
            monitor.stop()
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _become_writer(ingest: Ingest, stop: threading.Event) -> bool:
    """Wait until nobody else receives this feed into the log; False if that was cut short."""
    waiting = False
    while not stop.is_set():
        if ingest.open_unless_received():
            return True
        if not waiting:
            waiting = True
            _log.info(
                "another process receives this feed into log %s; waiting to receive in its place",
                ingest.storage.root,
            )
        stop.wait(_TICK_SECONDS)
    return False


def _report_until(stop: threading.Event, ingest: Ingest, monitor: SourceMonitor) -> None:
    end, ticks = ingest.log.durable_end, 0
    warnings = LimitedLog(__name__, "warnings about readers")
    next_full_line = 0.0
    while not stop.wait(_TICK_SECONDS):
        ingest.check()
        try:
            monitor.read_to(ingest.commit_readers() or 0)
            if ingest.log.full and time.monotonic() >= next_full_line:
                next_full_line = time.monotonic() + _FULL_SECONDS
                _log.warning("%s", _why_full(ingest))
        except LogError as e:  # a reader's file that makes no sense keeps what it may still need
            warnings.warn("%s", e)
        ticks += 1
        if ticks * _TICK_SECONDS >= _REPORT_SECONDS:
            ticks = 0
            if ingest.log.durable_end != end:
                end = ingest.log.durable_end
                _log.info("next id %d, %s", end, ingest.counters)


def _why_full(ingest: Ingest) -> str:
    """Who keeps a full log from going on, and what to do."""
    full = f"log {ingest.storage.root} has reached walMaxBytes, and receiving waits"
    readers = ingest.storage.readers()
    if not readers:
        return (
            f"{full}: no query has read it yet, and nothing is deleted before. Start one "
            '(spark.readStream.format("zmq").option("walLocation", ...)), or set a larger walMaxBytes'
        )
    slowest = min(readers, key=lambda name: readers[name])
    return (
        f"{full}: the query with reader={slowest} still needs the messages from id {readers[slowest]} on. If it is "
        f"gone for ever, remove {ingest.storage.reader_path(slowest)}, or set a shorter readerTimeout"
    )
