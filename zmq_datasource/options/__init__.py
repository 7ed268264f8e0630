"""Every option of the data source, declared once: name, type, default, range and doc.

How a declaration becomes a parsed, checked value is in ``parser``; the reference in
``docs/options.md`` is generated from these classes. What only libzmq can decide is checked in
``transport.spec``.
"""

from zmq_datasource.options.framing import FramingOptions, Numbering
from zmq_datasource.options.proxy import ProxyOptions
from zmq_datasource.options.read import BatchReadOptions, ReadOptions, ReceiveOptions, StreamReadOptions
from zmq_datasource.options.shares import share_of
from zmq_datasource.options.socket import SocketOptions
from zmq_datasource.options.write import WriteOptions

__all__ = [
    "BatchReadOptions",
    "FramingOptions",
    "Numbering",
    "ProxyOptions",
    "ReadOptions",
    "ReceiveOptions",
    "SocketOptions",
    "StreamReadOptions",
    "WriteOptions",
    "share_of",
]
