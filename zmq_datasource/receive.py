"""The receiver as a program: ``zmq-datasource receive`` and ``zmq-datasource proxy``."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zmq_datasource.host.locations import check_location
from zmq_datasource.host.readiness import Readiness
from zmq_datasource.host.signals import StopFlag
from zmq_datasource.monitoring.http import HttpAddress
from zmq_datasource.monitoring.prometheus import PrometheusOutlet, Shown
from zmq_datasource.monitoring.source import SOURCE, SourceMonitor
from zmq_datasource.monitoring.view import FigureLines, Figures, source_line
from zmq_datasource.options import ProxyOptions, ReceiveOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.serving.durable import DurableServer
from zmq_datasource.serving.figures import PROXY, SUBSCRIBER
from zmq_datasource.serving.proxy import Parent
from zmq_datasource.serving.publishing import Publishing
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.source.filling import filling_of
from zmq_datasource.source.receive_loop import Stopping
from zmq_datasource.transport.spec import SocketSpec

_log = logging.getLogger(__name__)

# Between warnings of a full log.
_FULL_SECONDS = 60.0
_FIGURES = Figures()
# How long another thread may keep the interpreter while messages wait to be published. Python's default is 5 ms, which
# would delay each message by as much.
_SWITCH_SECONDS = 0.0005


def receive_until_stopped(
    options: Mapping[str, str],
    prometheus: HttpAddress | None = None,
    figures: Figures = _FIGURES,
    ready_file: Path | None = None,
    kind: type[ReceiveOptions] = ReceiveOptions,
) -> None:
    """Receive into a log until SIGTERM or SIGINT. Then receive the messages that libzmq still holds, and return.

    Args:
        options: The options of the feed, as text.
        prometheus: Where figures are served for Prometheus; None serves none.
        figures: How figures are printed.
        ready_file: A file that exists while this program receives; None for no file.
        kind: The options of this program.

    Raises:
        ZmqDataSourceError: An option is wrong, a socket cannot be opened, receiving must end, or the log has a fault.
    """
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parsed = parse(kind, options)
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
    report: Callable[[Callable[[], Mapping[str, Any]]], None] | None = None,
) -> None:
    """Receive into a log until ``stopping`` is set. Then receive the messages that libzmq still holds, and return.

    For the other arguments and the errors, see ``receive_until_stopped``.

    Args:
        full_line_seconds: The time between warnings that say why the log is full.
        report: Called in a thread of its own. Its argument returns all figures; none while this process does not
            receive.
    """
    check_location("walStore", options.wal_store, reach=False)
    status = _Status(options, figures, Readiness(ready_file), full_line_seconds)
    if report is not None:
        threading.Thread(target=report, args=(status.figures,), name="zmq-status", daemon=True).start()
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
        self,
        options: ReceiveOptions,
        figures: Figures,
        readiness: Readiness,
        full_line_seconds: float,
    ) -> None:
        self._options = options
        self._durable: DurableServer | None = None
        self._publishing: Publishing | None = None
        if isinstance(options, ProxyOptions) and options.publish:
            self._publishing = Publishing(options)
            sys.setswitchinterval(_SWITCH_SECONDS)
        self.receiver = FeedReceiver(
            options,
            tick=self._update,
            fill=partial(filling_of, publisher=self._publishing),
            side=self._make_server if options.durable else None,
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
        if self._durable is not None:
            self._durable.check()
        self._monitor.mark_finished(receiver.log.needed)
        if receiver.log.full and time.monotonic() >= self._next_full_line:
            self._next_full_line = time.monotonic() + self._full_line_seconds
            _log.warning("%s", _why_full(receiver))
        self._lines.show(self.figures, receiver.log.durable_end)

    def figures(self) -> dict[str, Any]:
        """All figures of this process; none while it does not receive."""
        if self.receiver.state != "receiving":
            return {}
        found = {"nextId": self.receiver.log.durable_end, **self._monitor.metrics()}
        if self._publishing is not None:
            found |= self._publishing.figures()
        if self._durable is not None:
            found["durable"] = list(self._durable.accounts)
        return found

    def shown(self) -> Iterator[Shown]:
        """The figures of the receiver for Prometheus; none while another process receives."""
        found = []
        if self.receiver.state == "receiving":
            figures = self._monitor.metrics()
            found.append(((str(figures["source"]), self.receiver.log.log_id), figures))
        yield Shown(SOURCE, ("source", "log"), found)
        if self._publishing is not None:
            yield Shown(PROXY, (), [((), self._publishing.figures())])
        accounts = () if self._durable is None else self._durable.accounts
        yield Shown(SUBSCRIBER, ("name",), [((account["name"],), account) for account in accounts])


def _why_full(receiver: FeedReceiver) -> str:
    """Say that the log is full, which reader is furthest behind, and what to do."""
    full = f"{receiver.storage} has reached walMaxBytes, and receiving waits"
    slowest = min((lease for lease, _ in receiver.log.leases), key=lambda lease: lease.next, default=None)
    if slowest is None:
        return (
            f"{full}: no query has read it yet, so nothing is deleted. Start one "
            '(spark.readStream.format("zmq").option("walLocation", ...)), or set a larger walMaxBytes'
        )
    return (
        f"{full}: reader {slowest.name} still needs the messages from id {slowest.next} on. If it will not run again: "
        f"zmq-datasource log readers drop {receiver.storage.root} {slowest.name}"
    )


def main(descriptor: int) -> None:
    """Run the proxy of a ``Proxy``, until its process ends or a signal comes."""
    stop, parent = StopFlag(), Parent(descriptor)
    with stop.on_signals(), parent.telling_errors():
        receive_until(parse(ProxyOptions, parent.options), stop, report=partial(parent.report, stop=stop.set))
