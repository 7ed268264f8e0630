"""What runs in a process of a weather run: one role, until it is through, told to stop, or killed.

Usage: python -m tests.weather.child ROLE PAGE DISK SETTINGS

PAGE is the page of faults (``faults``), DISK the directory that they are about, SETTINGS a JSON object.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.weather.faults import Faults, install
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter

# In place of a second, and of ten in a bucket, so that what a writer puts off is done within a run.
_MERGING_SECONDS, _REQUEST_INTERVAL = 0.1, 0.5


def _source(settings: dict[str, Any], stopped: threading.Event) -> None:
    """A streaming query; on a socket, or on a log that another process fills."""
    from tests.weather.engine import Source  # noqa: PLC0415

    options = settings["options"]
    Source(Path(settings["directory"]), options, sees_log="serveLog" not in options).run(stopped.is_set)


def _machine(settings: dict[str, Any], stopped: threading.Event) -> None:
    """The same with a log in a bucket, beside other machines that are quick to take a silent one for dead.

    One that has lost the log to another ends with an error, and is started again. So is one that finds the port taken:
    two machines would have a port each.
    """
    from tests.weather.engine import Source  # noqa: PLC0415
    from zmq_datasource.errors import EndpointError, LogLockedError  # noqa: PLC0415
    from zmq_datasource.log.bucket_store import BucketStore  # noqa: PLC0415

    BucketStore.silent_seconds = 1.5
    while not stopped.is_set():
        try:
            Source(Path(settings["directory"]), settings["options"]).run(stopped.is_set)
        except (EndpointError, LogLockedError) as e:
            logging.getLogger(__name__).warning("started again after: %s", e)
            stopped.wait(0.2)


def _bucket(settings: dict[str, Any], stopped: threading.Event) -> None:
    """The server of a bucket."""
    from tests.weather.bucket import serve  # noqa: PLC0415

    serve(Path(settings["root"]), settings["endpoint"], Faults(Path(sys.argv[2])), stopped)


def _receive(settings: dict[str, Any], stopped: threading.Event) -> None:
    from zmq_datasource.receive import receive_until_stopped  # noqa: PLC0415

    receive_until_stopped(settings["options"])


def _sink(settings: dict[str, Any], stopped: threading.Event) -> None:
    """The sink of a streaming query: batch after batch, each repeated until it succeeds, as after a restart."""
    from tests.weather.engine import sink_batch  # noqa: PLC0415
    from zmq_datasource.errors import ZmqDataSourceError  # noqa: PLC0415

    journal = Path(settings["journal"])
    lines = journal.read_text().splitlines() if journal.exists() else []
    done = {json.loads(line).get("batch") for line in lines}
    with journal.open("a", buffering=1) as file:
        for batch in range(settings["batches"]):
            if batch in done:
                continue
            values = [
                [f"{batch}:{partition}:{row}" for row in range(settings["rows"])]
                for partition in range(settings["partitions"])
            ]
            while not stopped.is_set():
                try:
                    account = sink_batch(settings["options"], settings["query"], batch, values)
                except ZmqDataSourceError as e:
                    file.write(
                        json.dumps({"failed": batch, "error": f"{type(e).__name__}: {e}"[:300]}) + "\n"
                    )
                    stopped.wait(0.2)
                    continue
                file.write(json.dumps({"batch": batch, **account}) + "\n")
                break
            if stopped.wait(settings["pause"]):
                return


def _producer(settings: dict[str, Any], stopped: threading.Event) -> None:
    """Transactions, numbered on from what the receiver has; each flush is repeated until it succeeds."""
    from zmq_datasource import Producer  # noqa: PLC0415
    from zmq_datasource.errors import SocketError  # noqa: PLC0415

    def insist(act: Any) -> Any:
        while not stopped.is_set():
            try:
                return act()
            except SocketError as e:
                print(f"producer: {e}", file=sys.stderr, flush=True)
                stopped.wait(0.2)
        raise SystemExit(0)

    with Producer(settings["endpoint"], settings["name"], connectTimeout="5s", sendTimeout="5s") as producer:
        last = insist(lambda: producer.last_committed)
        for number in range(0 if last is None else last + 1, settings["transactions"]):
            for row in range(settings["rows"]):
                producer.send(f"{number}:{row}")
            insist(producer.flush)
            if stopped.wait(settings["pause"]):
                return


def _durable(settings: dict[str, Any], stopped: threading.Event) -> None:
    """A durable subscriber that writes down what it got and what it knows to be acknowledged."""
    from zmq_datasource import DurableSubscriber  # noqa: PLC0415
    from zmq_datasource.errors import SocketError  # noqa: PLC0415

    with Path(settings["journal"]).open("a", buffering=1) as file:
        while not stopped.is_set():
            file.write("began\n")
            try:
                given = settings["endpoint"], settings["name"]
                with DurableSubscriber(*given, auto_ack=False, timeout=5) as subscriber:
                    count, acked = 0, -1
                    while count < 20 and not stopped.is_set():
                        message = subscriber.receive(0.1)
                        if message is None:
                            continue
                        file.write(f"got {message.id} {message.value.decode()}\n")
                        count += 1
                        if count == 20 or message.value.decode() == settings["last"]:
                            subscriber.ack(message)
                            count, acked = 20, message.id
                if acked >= 0:  # the end of the block has waited for the disk
                    file.write(f"acked {acked}\n")
            except SocketError as e:
                if "Restore the file" in str(e) or "it does not exist" in str(e):
                    raise  # of a damage, which is restored when a process ends with it
                print(f"durable: {e}", file=sys.stderr, flush=True)
                stopped.wait(0.2)


_ROLES = {
    "source": _source,
    "machine": _machine,
    "bucket": _bucket,
    "receive": _receive,
    "sink": _sink,
    "producer": _producer,
    "durable": _durable,
}


def main() -> None:
    role, page, disk, settings = sys.argv[1:]
    install(Path(page), Path(disk))
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
        datefmt="%T",
    )
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    given = json.loads(settings)
    LogWriter.merge_seconds = _MERGING_SECONDS
    LogStorage.request_interval = property(  # type: ignore[assignment]
        lambda storage: 0.0 if storage.directory is not None else _REQUEST_INTERVAL
    )
    _ROLES[role](given, stopped)


def _end_with_parent() -> None:
    sys.stdin.read()  # the machine holds the other end for as long as it lives
    time.sleep(0.5)
    signal.raise_signal(signal.SIGKILL)


if __name__ == "__main__":
    main()
