"""The receiver as a program: ``zmq-datasource receive``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from zmq_datasource.host.locations import check_location
from zmq_datasource.host.readiness import Readiness
from zmq_datasource.host.signals import StopFlag
from zmq_datasource.monitoring.http import HttpAddress
from zmq_datasource.monitoring.prometheus import PrometheusOutlet, Shown
from zmq_datasource.monitoring.source import SOURCE, SourceMonitor
from zmq_datasource.monitoring.view import FigureLines, Figures, source_line
from zmq_datasource.options import ReceiveOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.serving.durable import DurableServer
from zmq_datasource.serving.figures import SUBSCRIBER
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.source.receive_loop import Stopping
from zmq_datasource.transport.spec import SocketSpec

_log = logging.getLogger(__name__)

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
        receive_until(parsed, stop, prometheus, figures, ready_file)


def receive_until(
    options: ReceiveOptions,
    stopping: Stopping,
    prometheus: HttpAddress | None = None,
    figures: Figures = _FIGURES,
    ready_file: Path | None = None,
    full_line_seconds: float = _FULL_SECONDS,
) -> None:
    """Receive into a log until ``stopping`` is set. Then receive the messages that libzmq still holds, and return.

    For the other arguments and the errors, see ``receive_until_stopped``.

    Args:
        full_line_seconds: The time between warnings that say why the log is full.
    """
    check_location("walStore", options.wal_store, reach=False)
    status = _Status(options, figures, Readiness(ready_file), full_line_seconds)
    outlet = None
    if prometheus is not None:
        outlet = PrometheusOutlet(status.shown, is_ready=lambda: status.readiness.is_ready)
        outlet.serve(prometheus)
    try:
        status.receiver.run(stopping)
    finally:
        status.readiness.set(False)
        if outlet is not None:
            outlet.close()


class _Status:
    """The receiver of this program, and what it shows: readiness, figures, and why the log is full."""

    def __init__(
        self, options: ReceiveOptions, figures: Figures, readiness: Readiness, full_line_seconds: float
    ) -> None:
        self._options = options
        self._durable: DurableServer | None = None
        self.receiver = FeedReceiver(
            options, tick=self._update, side=self._make_server if options.durable else None
        )
        self.readiness = readiness
        self._monitor = SourceMonitor(self.receiver, options)
        self._full_line_seconds = full_line_seconds
        self._next_full_line = 0.0
        self._lines = FigureLines(_log, source_line, figures)

    def _make_server(self, receiver: FeedReceiver) -> DurableServer:
        spec, expiry = SocketSpec.of_durable(self._options), self._options.subscriber_expiry
        self._durable = DurableServer(spec, receiver.storage, receiver.log, receiver.await_rows, expiry)
        return self._durable

    def _update(self) -> None:
        """Show the state of the receiver, whose loop calls this."""
        receiver = self.receiver
        self.readiness.set(receiver.state == "receiving")
        if receiver.state != "receiving":
            return
        self._monitor.mark_finished(receiver.log.needed)
        if receiver.log.full and time.monotonic() >= self._next_full_line:
            self._next_full_line = time.monotonic() + self._full_line_seconds
            _log.warning("%s", _why_full(receiver))
        self._lines.show(self._monitor.metrics, receiver.log.durable_end)

    def shown(self) -> Iterator[Shown]:
        """The figures of the receiver for Prometheus; none while another process receives."""
        found = []
        if self.receiver.state == "receiving":
            figures = self._monitor.metrics()
            found.append(((str(figures["source"]), self.receiver.log.log_id), figures))
        yield Shown(SOURCE, ("source", "log"), found)
        accounts = () if self._durable is None else self._durable.accounts
        yield Shown(SUBSCRIBER, ("name",), [((account["name"],), account) for account in accounts])


def _why_full(receiver: FeedReceiver) -> str:
    """Say that the log is full, which reader is furthest behind, and what to do."""
    full = f"{receiver.storage} has reached walMaxBytes, and receiving waits"
    slowest = receiver.log.slowest
    if slowest is None:
        return (
            f"{full}: no query has read it yet, so nothing is deleted. Start one "
            '(spark.readStream.format("zmq").option("walLocation", ...)), or set a larger walMaxBytes'
        )
    return (
        f"{full}: reader {slowest.name} still needs the messages from id {slowest.next} on. If it will not run again: "
        f"zmq-datasource log readers drop {receiver.storage.root} {slowest.name}"
    )
