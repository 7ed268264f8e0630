"""Text from a peer, made printable, controls no terminal, hides or forges no line, and is short."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.printable import printable


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
