"""Find the fields of messages in their frames, and restore frames from rows: pure functions that take many messages.

*Raw messages* are frames as they were received, in columns (``messages.raw``). These are the rules:

* ``decode`` raises nothing, for any bytes. A message that does not fit its framing is listed with a reason, and does
  not affect the messages beside it.
* Messages whose fields are at fixed places, and that fit, are decoded without Python code for each, except to read a
  sequence in JSON. Messages that do not fit are decoded one by one.
* A framing knows where fields are. ``sequences`` knows what the numbers mean.

Modules: ``fields`` is the result of decoding; ``layout`` decodes messages whose fields are at fixed places;
``batches`` makes record batches of fields, and restores frames; ``replay`` has the wire format of vLLM's replay
protocol.
"""

from __future__ import annotations

from zmq_datasource.messages.framing.batches import decode_plain, make_batch, raw_messages, to_rows
from zmq_datasource.messages.framing.fields import Fields
from zmq_datasource.messages.framing.layout import LayoutFraming

__all__ = [
    "Fields",
    "LayoutFraming",
    "decode_plain",
    "make_batch",
    "raw_messages",
    "to_rows",
]
