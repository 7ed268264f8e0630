"""Text from a peer, made printable, controls no terminal and forges no line; a flood of lines is counted."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmq_datasource.host.log_lines import LimitedLog, printable


@given(st.text() | st.binary(), st.integers(1, 50))
def test_a_result_is_printable_and_no_longer_than_asked_for(text: str | bytes, most: int) -> None:
    shown = printable(text, most)
    assert shown.isprintable()
    assert len(shown) <= most


@given(st.text(), st.integers(1, 50))
def test_printable_text_is_unchanged_and_bytes_are_read_as_utf8(text: str, most: int) -> None:
    clean = "".join(character for character in text if character.isprintable())
    whole = printable(clean, max(1, len(clean)))
    assert whole == clean
    try:
        data = clean.encode()
    except UnicodeEncodeError:
        return
    assert printable(data, most) == printable(clean, most)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("one\r\ntwo", r"one\r\ntwo"),
        ("\u202eesrever\u200b", r"\u202eesrever\u200b"),
        (b"\xff\x00orders", r"\xff\x00orders"),
        ("é ü", "é ü"),
        ("", ""),
    ],
)
def test_characters_that_control_a_terminal_are_escaped(text: str | bytes, shown: str) -> None:
    assert printable(text, 100) == shown


def test_a_text_that_is_cut_ends_with_an_ellipsis() -> None:
    assert printable("x" * 11, 10) == "x" * 9 + "…"
    assert printable("x" * 10, 10) == "x" * 10
    assert printable(b"x" * (64 << 20), 10) == "x" * 9 + "…"


def test_a_limited_log_cuts_each_text(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog("zmq_datasource.test", "messages")
    log.warn("%s and %r", "\x1b]0;title\x07" + "x" * 1_000_000, ValueError("\x1b[2J" + "y" * 1_000_000))
    with caplog.at_level(logging.WARNING):
        (said,) = caplog.messages
    assert len(said) < 3000
    assert said.isprintable()


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
