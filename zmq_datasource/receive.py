"""The receiver as a program: ``zmq-datasource receive``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zmq_datasource.errors import DiskFaultError, LogError
from zmq_datasource.host.locations import check_location
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.host.readiness import Readiness
from zmq_datasource.host.signals import StopFlag, forget_signal
from zmq_datasource.monitoring.http import HttpAddress
from zmq_datasource.monitoring.prometheus import PrometheusOutlet, Shown
from zmq_datasource.monitoring.source import SOURCE, SourceMonitor
from zmq_datasource.monitoring.view import FigureLines, Figures, source_line
from zmq_datasource.options import ReceiveOptions, StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.ingest import Ingest
from zmq_datasource.source.location import feed_of

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
# Between warnings of a full log.
_FULL_SECONDS = 60.0
_FIGURES = Figures()


def receive_until_stopped(
    options: Mapping[str, str],
    prometheus: HttpAddress | None = None,
    figures: Figures = _FIGURES,
    ready_file: Path | None = None,
) -> None:
    """Receive into a log until SIGTERM or SIGINT. Then receive the messages that libzmq still holds, and return.

    Args:
        options: The options of the feed, as text.
        prometheus: Where figures are served for Prometheus; None serves none.
        figures: How figures are printed.
        ready_file: A file that exists while this program receives; None for no file.

    Raises:
        ZmqDataSourceError: An option is wrong, a socket cannot be opened, receiving must end, or the log has a fault.
    """
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parsed = parse(ReceiveOptions, options)
    stop = StopFlag()
    with stop.on_signals():
        receive_until(parsed, stop.wait, prometheus, figures, ready_file)


def receive_until(
    options: StreamReadOptions,
    stopped: Callable[[float], bool],
    prometheus: HttpAddress | None = None,
    figures: Figures = _FIGURES,
    ready_file: Path | None = None,
    full_line_seconds: float = _FULL_SECONDS,
) -> None:
    """Receive into a log until ``stopped`` returns true. Then receive the messages that libzmq still holds, and return.

    For the other arguments and the errors, see ``receive_until_stopped``.

    Args:
        stopped: Waits up to the given number of seconds, and returns whether to stop.
        full_line_seconds: The time between warnings that say why the log is full.
    """
    check_location("walStore", options.wal_store, reach=False)
    receiver = _Receiver(options, full_line_seconds, figures)
    readiness = Readiness(ready_file)
    outlet = None
    if prometheus is not None:
        outlet = PrometheusOutlet(lambda: _shown(receiver), is_ready=lambda: readiness.is_ready)
        outlet.serve(prometheus)
    try:
        while not stopped(0.0):
            receiver.step()
            readiness.set(receiver.receives)
            if stopped(_TICK_SECONDS):
                return
    finally:
        forget_signal()
        readiness.set(False)
        if outlet is not None:
            outlet.close()
        receiver.stop()


def _shown(receiver: _Receiver) -> Iterator[Shown]:
    """The figures of the receiver for Prometheus; none while another process receives."""
    shown = receiver.metrics()
    yield Shown(SOURCE, ("source", "log"), [] if shown is None else [shown])


class _Receiver:
    """Receives into the log, or waits while another process does."""

    def __init__(self, options: StreamReadOptions, full_line_seconds: float, figures: Figures) -> None:
        self._options = options
        self._full_line_seconds = full_line_seconds
        self._ingest = Ingest(options)
        self._monitor: SourceMonitor | None = None
        self._is_waiting = False
        self._warnings = LimitedLog(__name__, "warnings about readers")
        self._next_full_line = 0.0
        self._lines = FigureLines(_log, source_line, figures)

    @property
    def receives(self) -> bool:
        """Whether this process has the log, and its sockets are open."""
        return self._monitor is not None

    def step(self) -> None:
        """Do what is due now. Called every ``_TICK_SECONDS``.

        While this process is not the writer: become the writer, if there is none. As the writer: give way to a query
        that has a ``replayEndpoint``, or else delete the messages that all readers have read, warn if the log is full,
        and log a status line.

        Raises:
            ZmqDataSourceError: Receiving cannot begin, or has ended.
        """
        if self._monitor is None:
            self._become_writer()
            return
        ingest, monitor, now = self._ingest, self._monitor, time.monotonic()
        ingest.check()
        if self._give_way():
            return
        try:
            monitor.mark_finished(ingest.commit_readers() or 0)
            if ingest.log.full and now >= self._next_full_line:
                self._next_full_line = now + self._full_line_seconds
                _log.warning("%s", _why_full(ingest))
        except LogError as e:  # while the record of a reader cannot be read, nothing is deleted
            self._warnings.warn("%s", e)
        self._lines.show(monitor.metrics, ingest.log.durable_end)

    def metrics(self) -> tuple[tuple[str, ...], Mapping[str, Any]] | None:
        """The labels and figures of this receiver; None while another process receives."""
        monitor = self._monitor
        if monitor is None:
            return None
        figures = monitor.metrics()
        return (str(figures["source"]), self._ingest.log.log_id), figures

    def _better_receiver(self) -> str | None:
        """The query that should receive instead, because it has a ``replayEndpoint`` and this program has none."""
        try:
            return self._ingest.replaying_query()
        except LogError as e:
            self._warnings.warn("looking for a query with a replayEndpoint: %s", e)
            return None

    def _give_way(self) -> bool:
        """Stop receiving if a query should receive instead, and wait to take over again. Returns whether it stopped."""
        if (better := self._better_receiver()) is None:
            return False
        _log.warning(
            "the query %r has a replayEndpoint, and this program has none: that query receives into %s from here on",
            better,
            self._ingest.storage,
        )
        try:
            self.stop()
        finally:
            self._ingest, self._monitor = Ingest(self._options), None
            self._is_waiting = True
        return True

    def _become_writer(self) -> None:
        """Start receiving, unless another process receives or should receive."""
        ingest = self._ingest
        if self._is_waiting and (self._others_receive() or self._better_receiver() is not None):
            return
        if ingest.open_unless_received():
            ingest.start()
            self._monitor = SourceMonitor(ingest, self._options)
        elif not self._is_waiting:
            self._is_waiting = True
            _log.info(
                "another process receives this feed into %s; waiting to receive in its place", ingest.storage
            )

    def _others_receive(self) -> bool:
        """Whether another process receives this feed, so that the lock need not be tried."""
        storage = self._ingest.storage
        try:
            return storage.is_written() and storage.feed() == feed_of(self._options)
        except DiskFaultError as e:
            self._warnings.warn("checking whether another process receives: %s", e)
            return True

    def stop(self) -> None:
        """Receive the messages that libzmq still holds, seal them, and release the log.

        Raises:
            LogError: The last messages could not be written.
        """
        if self._monitor is not None:
            self._ingest.stop()


def _why_full(ingest: Ingest) -> str:
    """Say that the log is full, which reader is furthest behind, and what to do."""
    full = f"{ingest.storage} has reached walMaxBytes, and receiving waits"
    readers = {name: record.next for name, record in ingest.readers.others().items()}
    if not readers:
        return (
            f"{full}: no query has read it yet, so nothing is deleted. Start one "
            '(spark.readStream.format("zmq").option("walLocation", ...)), or set a larger walMaxBytes'
        )
    slowest = min(readers, key=lambda name: readers[name])
    return (
        f"{full}: reader {slowest} still needs the messages from id {readers[slowest]} on. If its query will not "
        f"run again: zmq-datasource log readers drop {ingest.storage.root} {slowest}"
    )
