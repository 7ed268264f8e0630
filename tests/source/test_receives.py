"""What processes that share a log receive: the same, or an error that names the options. No JVM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.source.test_feed import filled, querying
from tests.support import (
    free_endpoint,
    keep_handlers,
    stop_sooner,
    stream_options,
    take_over,
    wait_for,
)
from zmq_datasource.errors import LogLockedError, OptionError
from zmq_datasource.source.feed_receiver import FeedReceiver


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch)
    take_over(monkeypatch, standby=0.01)
    monkeypatch.setattr(FeedReceiver, "lock_wait_seconds", 0.1)


@contextmanager
def receiving(location: Path, **options: Any) -> Iterator[FeedReceiver]:
    """A receiver that has the log, and not its sockets yet."""
    receiver = FeedReceiver(stream_options(walLocation=location, **options))
    assert receiver.open()
    try:
        yield receiver
    finally:
        receiver.stop()


SECRET = {"zmq.curve_secretkey": "a" * 40, "zmq.curve_publickey": "b" * 40, "zmq.curve_serverkey": "c" * 40}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"walRetention": "1h"}, r"walRetention=3600s \(there: 600s\)"),
        ({"topics": "b,c"}, r"topics=b,c \(there: a\)"),
        ({"zmq_rate": 7}, r"zmq\.\*=.*'rate': '7'.*\(there: .*'curve_secretkey': '\*\*\*'"),
        ({"whenFull": "discard"}, r"whenFull=discard \(there: wait\)"),
        ({"onLoss": "fail"}, r"onLoss=fail \(there: warn\)"),
    ],
)
def test_a_query_with_other_options_is_refused_with_their_names_while_another_process_receives(
    other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"connect": free_endpoint(), "topics": "a", "framing": "sequenced"} | SECRET
    options |= {"sequenceBy": "topic"}
    with receiving(tmp_path, **options):
        same = options | {"reader": "desk"}
        assert not FeedReceiver(stream_options(walLocation=tmp_path, **same)).open()
        with pytest.raises(LogLockedError, match=said) as refused:
            FeedReceiver(stream_options(walLocation=tmp_path, **options | other)).open()
        assert f"with walLocation={tmp_path} and no option" in str(refused.value)
        with querying(tmp_path) as query:
            query.step()
    assert not any(b"a" * 40 in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_the_next_receiver_may_have_other_values_which_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, 1).close()
    first = {"connect": free_endpoint(), "topics": "a,b", "walRetention": "1h"}
    moved = first | {"connect": free_endpoint(), "topics": "b,c", "walRetention": "1d"}
    for options, lines in ((first, 0), (first, 0), (moved, 1), (moved, 0)):
        caplog.clear()
        with receiving(tmp_path, **options):
            pass
        assert caplog.text.count("is received with new options") == lines
        if lines:
            assert "walRetention=86400s (before: 3600s)" in caplog.text
            assert "topics=b,c (before: a,b)" in caplog.text


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"framing": "sequenced", "topics": ""}, r"framing=sequenced \(in the log: plain\)"),
        ({"socketType": "PULL", "topics": ""}, r"socketType=PULL \(in the log: SUB\)"),
        ({"topics": "c"}, r"topics=c \(in the log: a,b\)"),
    ],
)
def test_messages_of_another_kind_are_not_received_into_a_log_with_messages(
    other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    options = {"connect": free_endpoint(), "topics": "a,b"}
    with receiving(tmp_path / "empty", **options):
        pass
    with receiving(tmp_path / "empty", **options | other):
        pass
    filled(tmp_path, 1).close()
    with receiving(tmp_path, **options):
        pass
    refused = FeedReceiver(stream_options(walLocation=tmp_path, **options | other))
    with pytest.raises(OptionError, match=said):
        refused.open()
    with receiving(tmp_path, **options | {"topics": "abc"}):  # some of what the log has
        pass


def test_a_standby_fails_when_a_process_with_other_options_has_taken_the_log(tmp_path: Path) -> None:
    """Between two receivers the lock is free."""
    endpoint = free_endpoint()
    with querying(tmp_path, connect=endpoint) as one, querying(tmp_path, connect=endpoint) as two:
        take_over_later = pytest.MonkeyPatch()
        take_over(take_over_later, standby=0.3)
        one.step(), two.step()
        take_over_later.undo()
        one.reader.stop()
        with (
            receiving(tmp_path, connect=endpoint, socketType="PULL", walRetention="1h"),
            pytest.raises(LogLockedError, match=r"filled with other options by process.*walRetention=0s"),
        ):
            wait_for(lambda: two.step() < 0, "an error")
