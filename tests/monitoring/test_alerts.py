"""conf/prometheus-alerts.yml: what a real receiver serves when something is wrong makes the right rule fire."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from tests.support import REPOSITORY, Socket, bound, free_endpoint, offer, wait_for
from tests.support.ports import free_port

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool, which is part of Prometheus, is not on PATH"
)

Context = zmq.Context[Socket]
# By a series' name and labels, as Prometheus writes it.
Scrape = dict[str, float]


class Receiver:
    """``zmq-datasource receive`` in a process of its own."""

    def __init__(self, port: int) -> None:
        self._port = port

    def scrape(self) -> Scrape:
        """What Prometheus gets; nothing before the program serves its figures."""
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as answer,
        ):
            return {
                f"{sample.name}{{{','.join(f'{k}={json.dumps(v)}' for k, v in sample.labels.items())}}}": sample.value
                for family in text_string_to_metric_families(answer.read().decode())
                for sample in family.samples
            }
        return {}

    def scrape_when(self, series: str, value: float) -> Scrape:
        """The first scrape in which a series has this value."""

        def wanted() -> Scrape | None:
            found = self.scrape()
            return found if any(s.startswith(series) and v == value for s, v in found.items()) else None

        return wait_for(wanted, f"{series} {value}")


@contextmanager
def receiving(log: Path, endpoint: str, *options: str) -> Iterator[Receiver]:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "zmq_datasource",
        "receive",
        "--socket-type",
        "PULL",
        "--connect",
        endpoint,
    ]
    command += ["--wal-location", str(log), "--prometheus", str(port), *options]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield Receiver(port)
    finally:
        running.terminate()
        running.wait(30)


def assert_fires(directory: Path, expected: set[str], *scrapes: Scrape) -> None:
    """Let each of the scrapes be all that Prometheus sees for five minutes, and compare the alerts that then fire."""
    series = {name for scrape in scrapes for name in scrape}
    values = {
        name: " ".join(f"{scrape[name]:.3f}x19" if name in scrape else "_x20" for scrape in scrapes)
        for name in series
    }
    tests = {
        "rule_files": [str(REPOSITORY / "conf" / "prometheus-alerts.yml")],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": values[name]} for name in sorted(series)],
                "promql_expr_test": [
                    {
                        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": f"{5 * len(scrapes) - 1}m",
                        "exp_samples": [
                            {
                                "labels": f'{{alertname="{name}"}}',
                                "value": 1,
                            }
                            for name in sorted(expected)
                        ],
                    }
                ],
            }
        ],
    }
    file = directory / "tests.json"
    file.write_text(json.dumps(tests))  # JSON is YAML
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_receiver_without_a_publisher_is_told_of(tmp_path: Path) -> None:
    with receiving(tmp_path / "log", free_endpoint()) as receiver:
        scrape = receiver.scrape_when("zmq_source_connections{", 0)
    assert_fires(tmp_path, {"ZmqSourceNotConnected"}, scrape)


def test_a_receiver_whose_log_is_full_is_told_of(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
    with receiving(tmp_path / "log", endpoint, "--wal-max-bytes", "200k") as receiver:

        def full() -> Scrape | None:
            offer(push, b"x" * 10_000)
            found = receiver.scrape()
            causes = {s for s, v in found.items() if s.startswith("zmq_source_receive_paused{") and v == 1}
            return found if any('cause="logFull"' in cause for cause in causes) else None

        scrape = wait_for(full, "a full log")
    assert_fires(tmp_path, {"ZmqSourcePaused"}, scrape)


def test_a_loss_that_a_receiver_has_counted_is_told_of(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    numbered = ("-o", "framing=custom", "-o", "sequenceAt=0:0:u64be")
    with receiving(tmp_path / "log", endpoint, *numbered) as receiver:
        push.send(bytes(7) + b"\x01")
        well = receiver.scrape_when("zmq_source_messages_received_total{", 1)
        push.send(bytes(7) + b"\x04")
        lost = receiver.scrape_when("zmq_source_messages_lost{", 2)
    assert_fires(tmp_path, set(), well)
    assert_fires(tmp_path, {"ZmqSourceLost"}, well, lost)
