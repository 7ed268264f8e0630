"""Log lines at a limited rate: left out lines are counted, and no record keeps a refused message."""

from __future__ import annotations

import logging

import pytest

from zmq_datasource.host.limited_logging import LimitedLog


def test_a_flood_becomes_some_lines_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    lines, seconds = 3, 7.0
    log = LimitedLog("zmq_datasource.test", "floods", lambda: now, lines, seconds)
    for number in range(1000):
        log.warn("flood %d", number)
    assert [record.getMessage() for record in caplog.records] == [f"flood {n}" for n in range(lines)]
    now = seconds + 1.0
    log.flush()
    log.flush()
    assert caplog.messages[lines:] == [f"{1000 - lines} more floods in the last {seconds:.0f} s"]
    log.warn("again")
    assert caplog.messages[-1] == "again"


def test_a_record_keeps_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Through the frames of a traceback a handler that keeps records would keep every refused message."""
    with caplog.at_level(logging.WARNING):
        try:
            int("x")
        except ValueError as e:
            LimitedLog("zmq_datasource.test", "errors").warn("refused %s of %d", e, 5)
    assert caplog.messages == ["refused invalid literal for int() with base 10: 'x' of 5"]
    assert not any(isinstance(arg, BaseException) for arg in caplog.records[0].args or ())
