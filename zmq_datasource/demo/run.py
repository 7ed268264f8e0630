"""Leads through the demo: peers, Spark, the queries, the account; and ends all of it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from zmq_datasource.demo.counts import QueryCounts
from zmq_datasource.demo.display import Screen, print_result
from zmq_datasource.demo.errors import DemoError, plain_reason
from zmq_datasource.demo.job import SLOW_SINK, RunningQuery, TopicTable, start_aggregation, start_sink
from zmq_datasource.demo.peers import TOPIC_PREFIX, Peer, consume, publish
from zmq_datasource.demo.session import spark_session
from zmq_datasource.demo.verdict import findings
from zmq_datasource.errors import LogError
from zmq_datasource.log import LogStorage
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.transport.spec import SocketSpec, check_socket_options

__all__ = ["feed_options", "run_demo"]

_AGGREGATION, _FAST, _SLOW = "aggregation", "fast sink", "slow sink"
_PUBLISHED_PER_SECOND = 2000
_SLOW_PER_SECOND = 1000
_RCVHWM = 100
_REFRESH_SECONDS = 0.25
_DRAIN_SECONDS = 15.0
_START_SECONDS = 60.0
_SETTLE_SECONDS = 60.0
_UNDER_WAY_SECONDS = 1.0


def feed_options(endpoint: str, socket_type: str, topics: str | None) -> dict[str, str]:
    """The options of a source that reads the user's own feed.

    Raises:
        OptionError: A wrong one; names it.
    """
    options = {"connect": endpoint, "socketType": socket_type}
    if topics is not None:
        options["topics"] = topics
    check_socket_options(SocketSpec.of_source(parse(StreamReadOptions, options)))
    return options


def run_demo(console: Console, seconds: float, feed: Mapping[str, str] | None = None) -> None:
    """Stream for ``seconds`` and show what became of every message.

    Args:
        console: Where to show it.
        seconds: How long messages flow; starting and ending come on top.
        feed: Options of the user's own feed; None for a publisher of the demo's own.

    Raises:
        DemoError: It could not be shown; one line says why.
    """
    with ExitStack() as stack:
        # What is entered last ends first: Spark, then the peers, then the directory.
        work = Path(tempfile.mkdtemp(prefix="zmq-datasource-demo-"))
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        stack.callback(_wait_for_receivers, work)
        try:
            demo = _Demo(console, seconds, feed, work)
            accounts, topics = demo.run()
        except DemoError:
            raise
        except Exception as e:
            raise DemoError(f"{plain_reason(e)}{_keep_log(work)}") from e
    slow = f"{SLOW_SINK['sndhwm']} messages of queue, a consumer of {_SLOW_PER_SECOND} a second, noblock=true"
    pull = feed is not None and feed["socketType"] == "PULL"
    print_result(
        console, accounts, topics, findings(accounts, pull=pull, settled=demo.settled, slow_settings=slow)
    )


class _Demo:
    """One run: what is running, and what it has counted so far.

    Attributes:
        settled: Whether the queries read all that was published before they were stopped.
    """

    def __init__(self, console: Console, seconds: float, feed: Mapping[str, str] | None, work: Path) -> None:
        self._console = console
        self._seconds = seconds
        self._feed = feed
        self._work = work
        self._publisher: Peer | None = None
        self._consumers: dict[str, Peer] = {}
        self._queries: list[RunningQuery] = []
        self._topics: TopicTable | None = None
        self.settled = True

    def run(self) -> tuple[list[QueryCounts], TopicTable]:
        with ExitStack() as stack:
            self._screen = stack.enter_context(Screen(self._console))
            self._show("Starting the publisher, the consumers and Spark ...")
            feed = self._start_peers(stack)
            spark = stack.enter_context(spark_session(self._work))
            if self._publisher is not None:
                # Before Spark: a receiver drains its socket at the end, as long as messages come.
                stack.callback(self._publisher.end)
            # The end is short and must be complete: nothing that was started may be left.
            for number in (signal.SIGINT, signal.SIGTERM):
                stack.callback(signal.signal, number, signal.SIG_IGN)
            self._show("Starting three streaming queries ...")
            own = self._feed is not None
            query, self._topics = start_aggregation(spark, feed, self._work, _AGGREGATION, own_feed=own)
            self._queries.append(query)
            for name, consumer in self._consumers.items():
                to = consumer.endpoint()
                self._queries.append(start_sink(spark, feed, self._work, name, to, slow=name == _SLOW))
            self._stream()
            if self._publisher is not None:
                self._publisher.finish()
                self.settled = self._wait("Reading the rest ...", _SETTLE_SECONDS, self._settled())
            self._show("Stopping the queries ...")
            for query in self._queries:
                query.stop()
            for consumer in self._consumers.values():
                consumer.finish()
            accounts = self._update()
        if not any(account.received for account in accounts):
            raise DemoError(
                f"nothing was received in {self._seconds:g} s from {feed['connect']}: nobody publishes there, or on "
                "other topics, or from a socket of another type"
            )
        return accounts, self._topics

    def _start_peers(self, stack: ExitStack) -> Mapping[str, str]:
        """Start the processes around Spark; returns the options of the feed."""

        def start(work: Callable[..., None], *args: Any) -> Peer:
            peer = Peer(work, *args)
            stack.callback(peer.end)
            return peer

        if self._feed is None:
            self._publisher = start(publish, 3, _PUBLISHED_PER_SECOND)
        self._consumers[_FAST] = start(consume, None, 1000, -1)
        self._consumers[_SLOW] = start(consume, _SLOW_PER_SECOND, 10, 4096)
        if self._feed is not None:
            return self._feed
        assert self._publisher is not None
        return {"connect": self._publisher.endpoint(), "topics": TOPIC_PREFIX, "rcvhwm": str(_RCVHWM)}

    def _stream(self) -> None:
        """Let messages flow for the time asked for, from when every query receives."""
        publisher = self._publisher

        def started(_: list[QueryCounts]) -> bool:
            if publisher is not None:  # which waits for every query
                return publisher.count > 0
            return all(query.tally.as_of for query in self._queries)

        if not self._wait("Starting three streaming queries ...", _START_SECONDS, started):
            raise DemoError(f"the queries did not begin to receive within {_START_SECONDS:.0f} s")
        began = time.monotonic()
        while (gone := time.monotonic() - began) < self._seconds:
            self._show(f"Streaming for {self._seconds:g} s ...", gone / self._seconds)
            time.sleep(min(_REFRESH_SECONDS, self._seconds - gone))

    def _wait(self, stage: str, seconds: float, done: Callable[[list[QueryCounts]], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if done(self._show(stage)):
                return True
            time.sleep(_REFRESH_SECONDS)
        return False

    def _settled(self) -> Callable[[list[QueryCounts]], bool]:
        """A test for: every message that can still come has become a row."""
        # What PUB dropped will never come; by this time all else has.
        arrived_by = datetime.now(UTC) + timedelta(seconds=_UNDER_WAY_SECONDS)

        def settled(accounts: list[QueryCounts]) -> bool:
            up_to_date = all(query.tally.as_of and query.tally.as_of >= arrived_by for query in self._queries)
            return all(a.rows == a.received for a in accounts) and (
                up_to_date or all(a.received == a.published for a in accounts)
            )

        return settled

    def _show(self, stage: str, done: float | None = None) -> list[QueryCounts]:
        accounts = self._update()
        self._screen.show(stage, done, accounts, self._topics)
        return accounts

    def _update(self) -> list[QueryCounts]:
        """Read the newest counts of the publisher, the queries and the consumers."""
        published = self._publisher.update() if self._publisher else None
        accounts = []
        for query in self._queries:
            query.update()
            consumer = self._consumers.get(query.name)
            accounts.append(
                QueryCounts(
                    query.name,
                    published,
                    query.tally.received,
                    query.tally.rows,
                    query.tally.sink if consumer else None,
                    consumer.update() if consumer else None,
                )
            )
        return accounts


def _wait_for_receivers(work: Path) -> None:
    """Spark does not wait for its receivers, which drain and seal at the end; their locks tell."""
    for location in work.glob("*/log"):
        log = LogStorage(str(location))
        for partition in log.partitions():
            with suppress(LogError):
                log.of(partition).lock(_DRAIN_SECONDS).release()


def _keep_log(work: Path) -> str:
    """Save Spark's log from the directory that is about to be removed; returns where, in words."""
    with suppress(OSError):
        handle, kept = tempfile.mkstemp(prefix="zmq-datasource-demo-", suffix=".log")
        os.close(handle)
        shutil.copyfile(work / "spark.log", kept)
        return f" (Spark's log: {kept})"
    return ""
