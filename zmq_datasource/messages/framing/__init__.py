"""Frames to message fields, and back: pure functions over bytes, many messages a call.

*Raw messages* are what a receive loop collects without looking: columns of frames (``messages.raw``).

The rules:

* Whatever the bytes are, ``decode`` returns: what does not fit is named, with a reason, and
  what fits beside it is not touched.
* Messages that fit take no Python step each; those that do not are looked at one by one.
* A framing knows where the fields are, not what the numbers mean: that is ``sequences``.

Modules: ``fields`` is what a decoder gives; ``layout`` reads messages whose fields are at fixed
places, ``dafka`` and ``jupyter`` those of their own kind; ``presets`` makes the framing that the
options ask for; ``plain`` needs none; ``rows`` makes Arrow of it and gives the frames back;
``replay`` is the wire of vLLM's replay protocol.
"""

from __future__ import annotations

from zmq_datasource.messages.framing.fields import Announced, Fields, Malformed
from zmq_datasource.messages.framing.plain import decode_plain
from zmq_datasource.messages.framing.presets import Framing, make_framing, subscriptions
from zmq_datasource.messages.framing.rows import make_batch, name_of, raw_messages, to_rows

__all__ = [
    "Announced",
    "Fields",
    "Framing",
    "Malformed",
    "decode_plain",
    "make_batch",
    "make_framing",
    "name_of",
    "raw_messages",
    "subscriptions",
    "to_rows",
]
