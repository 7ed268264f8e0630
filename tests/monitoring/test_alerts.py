"""conf/prometheus-alerts.yml: what a real receiver serves when something is wrong makes the right rule fire."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from tests.support import REPOSITORY, Socket, bound, free_endpoint, offer, wait_for
from tests.support.ports import free_port
from tests.support.programs import page, program

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool, which is part of Prometheus, is not on PATH"
)

# The value of each series.
Scrape = dict[str, str]


@contextmanager
def receiving(directory: Path, endpoint: str, *options: str) -> Iterator[int]:
    """The port at which a receiver serves its figures."""
    port = free_port()
    arguments = ["receive", "--socket-type", "PULL", "--connect", endpoint, "--prometheus", str(port)]
    with program(*arguments, "--wal-location", str(directory / "log"), *options):
        yield port


def scraped(port: int, series: str, value: str) -> Scrape | None:
    """All series, if one that has all these words has this value."""
    lines = [line.rpartition(" ") for line in page(port)[1].splitlines() if not line.startswith("#")]
    wanted = any(all(word in name for word in series.split()) and v == value for name, _, v in lines)
    return {name: v for name, _, v in lines} if wanted else None


def assert_fires(directory: Path, expected: list[str], *scrapes: Scrape) -> None:
    """Let each of the scrapes be all that Prometheus sees for five minutes, and compare the alerts that then fire."""
    names = sorted({name for scrape in scrapes for name in scrape})
    fired = {
        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": f"{5 * len(scrapes) - 1}m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected],
    }
    test = {
        "interval": "15s",
        "input_series": [
            {"series": name, "values": " ".join(f"{s[name]}x19" if name in s else "_x20" for s in scrapes)}
            for name in names
        ],
        "promql_expr_test": [fired],
    }
    rules = str(REPOSITORY / "conf" / "prometheus-alerts.yml")
    file = directory / "tests.json"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [rules], "evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_receiver_without_a_publisher_is_told_of(tmp_path: Path) -> None:
    with receiving(tmp_path, free_endpoint()) as port:
        alone = wait_for(lambda: scraped(port, "zmq_source_connections{", "0.0"), "no connection")
    assert_fires(tmp_path, ["ZmqSourceNotConnected"], alone)


def test_a_receiver_whose_log_is_full_is_told_of(context: zmq.Context[Socket], tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
    with receiving(tmp_path, endpoint, "--wal-max-bytes", "200k") as port:

        def full() -> Scrape | None:
            offer(push, b"x" * 10_000)
            return scraped(port, "zmq_source_receive_paused{ logFull", "1.0")

        assert_fires(tmp_path, ["ZmqSourcePaused"], wait_for(full, "a full log"))


def test_a_loss_that_a_receiver_has_counted_is_told_of(context: zmq.Context[Socket], tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with receiving(tmp_path, endpoint, "-o", "framing=custom", "-o", "sequenceAt=0:0:u64be") as port:
        push.send((1).to_bytes(8, "big"))
        well = wait_for(lambda: scraped(port, "zmq_source_messages_received_total{", "1.0"), "a message")
        push.send((4).to_bytes(8, "big"))
        lost = wait_for(lambda: scraped(port, "zmq_source_messages_lost{", "2.0"), "a loss")
    assert_fires(tmp_path, [], well)
    assert_fires(tmp_path, ["ZmqSourceLost"], well, lost)
