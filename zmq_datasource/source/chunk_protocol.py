"""The protocol between the driver, which serves a query's log, and executors that do not see the log's directory.

* A request is one frame: the secret (32 bytes), a number of 8 bytes, and ``<log id>/<partition>/<name>`` as text. The
  name is that of a chunk, or one of two others. ``begin`` asks for the first id of the partition.
  ``skipped-<first>-<end>-<reader>`` reports that a task of this reader has skipped the ids ``[first, end)``, because
  they were deleted.
* The first frame of an answer has the number and a status (``_HEAD``). The other frames have the content. For a chunk,
  that is the whole file, in pieces of at most ``FRAME_BYTES``. For ``begin``, it is the id as decimal text, or nothing
  if the partition has no chunks. For ``skipped``, it is nothing. A status other than 0 is an error number of the system
  (ENOENT: the chunk does not exist), and the next frame has the text of the error.

libzmq applies MAXMSGSIZE to each frame alone, so a chunk may have any size, even more than 1 GiB. CURVE protects the
bytes on the wire, and each record batch has its own checksum.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from zmq_datasource.log import parse_partition_name
from zmq_datasource.options.offsets import READER_PATTERN

__all__ = [
    "BEGIN",
    "FRAME_BYTES",
    "MOST_REQUEST_BYTES",
    "SECRET_BYTES",
    "Access",
    "Request",
    "pack_head",
    "parse_skipped",
    "skipped_name",
    "unpack_head",
]

SECRET_BYTES = 32
# libzmq encrypts a frame as a whole, which takes several times the memory of the frame.
FRAME_BYTES = 1 << 20
BEGIN = "begin"

_NUMBER = struct.Struct(">Q")
_HEAD = struct.Struct(">QI")
_LONGEST_TEXT = 512
MOST_REQUEST_BYTES = SECRET_BYTES + _NUMBER.size + _LONGEST_TEXT
_SKIPPED = re.compile(rf"skipped-([0-9]{{1,20}})-([0-9]{{1,20}})-({READER_PATTERN.strip('^$')})")


def skipped_name(reader: str, first: int, end: int) -> str:
    """The name in a request with this meaning: a task of this reader has skipped the ids ``[first, end)``."""
    return f"skipped-{first}-{end}-{reader}"


def parse_skipped(name: str) -> tuple[str, int, int] | None:
    """The arguments of ``skipped_name``; None for another name."""
    match = _SKIPPED.fullmatch(name)
    return None if match is None else (match[3], int(match[1]), int(match[2]))


class Access(NamedTuple):
    """The data with which an executor can ask the server.

    Attributes:
        endpoints: The addresses of the server. Which of them work depends on the executor's machine.
        server_key: The server's public key, in Z85.
        secret: The first bytes of each request.
        log_id: The log that the server has.
    """

    endpoints: tuple[str, ...]
    server_key: bytes
    secret: bytes
    log_id: str

    def __repr__(self) -> str:
        return f"Access({', '.join(self.endpoints)})"  # no secret in a plan or a log


class Request(NamedTuple):
    """A request. It has all that the server needs for the answer."""

    number: int
    log_id: str
    partition: int
    name: str

    def to_frame(self, secret: bytes) -> bytes:
        return secret + _NUMBER.pack(self.number) + f"{self.log_id}/{self.partition}/{self.name}".encode()

    @classmethod
    def of_frame(cls, frame: bytes) -> tuple[bytes, Request]:
        """Decode a frame into the secret and the request.

        Raises:
            ValueError: The frame is not a request.
        """
        begin = SECRET_BYTES + _NUMBER.size
        if not begin < len(frame) <= MOST_REQUEST_BYTES:
            raise ValueError(f"a request of {len(frame)} bytes")
        (number,) = _NUMBER.unpack_from(frame, SECRET_BYTES)
        log_id, partition, name = frame[begin:].decode().split("/")
        of = parse_partition_name(partition)
        if of is None:
            raise ValueError(f"a request for partition {partition!r}")
        return frame[:SECRET_BYTES], cls(number, log_id, of, name)


def pack_head(number: int, error: int) -> bytes:
    """Encode the first frame of an answer; ``error`` is the status."""
    return _HEAD.pack(number, error)


def unpack_head(frame: bytes) -> tuple[int, int] | None:
    """Decode the first frame of an answer into number and status; None if it is not such a frame."""
    if len(frame) != _HEAD.size:
        return None
    number, error = _HEAD.unpack(frame)
    return number, error
