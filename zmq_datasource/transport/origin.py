"""Where a message comes from, as libzmq tells with its frames.

A connection that its peer resets at once has no address any more when libzmq asks for it, and then its messages tell
nothing of it: anybody can send such messages, so nothing here raises.
"""

from __future__ import annotations

import zmq

__all__ = ["origin_of", "user_of"]


def origin_of(frame: zmq.Frame) -> int:
    """The descriptor of the connection that a frame came by; -1 if libzmq does not tell."""
    try:
        return int(frame.get(zmq.MessageOption.SRCFD))
    except zmq.ZMQError:
        return -1


def user_of(frame: zmq.Frame) -> str:
    """Whom the ZAP handler took the sender for; empty if libzmq does not tell."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
