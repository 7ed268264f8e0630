"""Makes text that a peer has sent safe to show in a log line, an error or a terminal. Pure."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str | bytes, most: int) -> str:
    """Escape the unprintable characters of a text, and cut it to ``most`` characters.

    Unprintable characters control a terminal or hide text: control characters, line ends, marks of the
    writing direction. Bytes that are not UTF-8 are escaped too, as in ``\\xff``.

    Args:
        text: Of any size; only its first ``most`` characters are read.
        most: Limit of the result's characters, at least 1. A text that is cut ends with ``…``.
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
