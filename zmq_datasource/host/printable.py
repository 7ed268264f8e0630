"""Text of a peer for a person: a log line, an error, a terminal. Pure."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str | bytes, most: int) -> str:
    """A text with its unprintable characters escaped, and cut to ``most`` characters.

    Unprintable are the characters that steer a terminal or hide text: control characters, line ends, marks of the
    writing direction. Bytes that are no UTF-8 are escaped too, as in ``\\xff``.

    Args:
        text: Of any size; no more than ``most`` characters of it are looked at.
        most: Characters of the result, at least 1. A text that is cut ends with ``…``.
    """
    if isinstance(text, bytes):
        # A character has up to 4 bytes. If the cut goes through one, it is cut off again below.
        text = text[: 4 * (most + 1)].decode("utf-8", "backslashreplace")
    shown = text[: most + 1]
    if not shown.isprintable():
        shown = "".join(map(_escaped, shown))
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
