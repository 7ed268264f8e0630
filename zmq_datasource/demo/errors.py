"""Why a demo could not be shown, in one line for the terminal."""

from __future__ import annotations

import re

from zmq_datasource.errors import ZmqDataSourceError

__all__ = ["DemoError", "plain_reason"]


class DemoError(ZmqDataSourceError):
    """The demo cannot go on; the message is for its user."""


def plain_reason(error: BaseException | str) -> str:
    """The line that matters of what Spark reports: a Python traceback within a JVM one.

    >>> plain_reason("Traceback ...\\nzmq_datasource.errors.EndpointError: binding ipc:///a: in use\\nat org...")
    'binding ipc:///a: in use'
    """
    text = str(error)
    ours = re.findall(r"zmq_datasource\.errors\.\w+: (.+)", text)
    if ours:
        return str(ours[-1]).strip()
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
