"""The declaration of every option: name, type, default, range and description.

``parser`` reads text into checked values. ``docs/options.md`` is generated from these classes. Socket options that only
libzmq can check are checked in ``transport.spec``.
"""

from zmq_datasource.options.framing import FramingOptions
from zmq_datasource.options.presets import PRESETS, Layout, Numbering, SequenceAt
from zmq_datasource.options.proxy import ProxyOptions
from zmq_datasource.options.read import BatchReadOptions, ReadOptions, ReceiveOptions, StreamReadOptions
from zmq_datasource.options.write import WriteOptions

__all__ = [
    "PRESETS",
    "BatchReadOptions",
    "FramingOptions",
    "Layout",
    "Numbering",
    "ProxyOptions",
    "ReadOptions",
    "ReceiveOptions",
    "SequenceAt",
    "StreamReadOptions",
    "WriteOptions",
]
