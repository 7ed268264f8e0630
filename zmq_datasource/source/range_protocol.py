"""How executors that do not see a log's directory read its chunks: what is said on the wire, and who may.

The driver's source runner listens on a ROUTER with CURVE, under a key that is made when it begins; an executor connects
a DEALER. Server key and secret travel with the tasks, as whatever Spark gives its executors.

* A request is one frame: the secret (32 bytes), a number that comes back, a log partition, an offset and a length, each
  as in ``_REQUEST``, and the chunk's name. Length 0 asks how long the chunk is.
* In place of a chunk's name, ``begin`` asks which id the partition begins with, and ``skipped-<first>-<end>-<reader>``
  says that a task of this reader has skipped the ids ``[first, end)``, because they were deleted. Both have offset and
  length 0. The answers are the id as decimal text, or an empty text for a partition without chunks; and an empty text.
* An answer is two frames: the number and a status as in ``_ANSWER``, then the bytes; for length 0 the size as decimal
  text; where the status is not 0 it is the system's error number, and the second frame says what went wrong.

Nothing is kept between two requests, so whoever hears nothing asks again. CURVE guards the bytes on the wire, and each
record batch has a checksum of its own.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from zmq_datasource.options.offsets import READER_PATTERN

__all__ = [
    "BEGIN",
    "BLOCK_BYTES",
    "MOST_ANSWER_BYTES",
    "MOST_REQUEST_BYTES",
    "SECRET_BYTES",
    "Access",
    "Answer",
    "Request",
    "parse_skipped",
    "skipped_name",
]

SECRET_BYTES = 32
# Most that one request may ask for.
BLOCK_BYTES = 1 << 20

_REQUEST = struct.Struct(">QIQI")
_ANSWER = struct.Struct(">QI")
_LONGEST_NAME = 255
# In place of a chunk's name: which id the partition begins with.
BEGIN = "begin"
_SKIPPED = re.compile(rf"skipped-([0-9]{{1,20}})-([0-9]{{1,20}})-({READER_PATTERN.strip('^$')})")


def skipped_name(reader: str, first: int, end: int) -> str:
    """In place of a chunk's name: a task of this reader has skipped the ids ``[first, end)``."""
    return f"skipped-{first}-{end}-{reader}"


def parse_skipped(name: str) -> tuple[str, int, int] | None:
    """What ``skipped_name`` was given; None for another name."""
    match = _SKIPPED.fullmatch(name)
    return None if match is None else (match[3], int(match[1]), int(match[2]))


class Access(NamedTuple):
    """What an executor needs to be served.

    Attributes:
        endpoints: Where the server may be reached; which of them is, depends on who asks.
        server_key: Its public key, in Z85.
        secret: What each request begins with.
        log_id: The log that is served.
    """

    endpoints: tuple[str, ...]
    server_key: bytes
    secret: bytes
    log_id: str

    def __repr__(self) -> str:
        return f"Access({', '.join(self.endpoints)})"  # no secret in a plan or a log


class Request(NamedTuple):
    """Bytes of a chunk that are asked for."""

    number: int
    partition: int
    offset: int
    length: int
    name: str

    def to_frame(self, secret: bytes) -> bytes:
        return secret + _REQUEST.pack(*self[:4]) + self.name.encode()

    @classmethod
    def of_frame(cls, frame: bytes) -> tuple[bytes, Request]:
        """The secret and the request.

        Raises:
            ValueError: It is none.
        """
        begin = SECRET_BYTES + _REQUEST.size
        if not begin < len(frame) <= begin + _LONGEST_NAME:
            raise ValueError(f"a request of {len(frame)} bytes")
        number, partition, offset, length = _REQUEST.unpack_from(frame, SECRET_BYTES)
        if length > BLOCK_BYTES:
            raise ValueError(f"a request for {length} bytes")
        return frame[:SECRET_BYTES], cls(number, partition, offset, length, frame[begin:].decode())


# libzmq measures a frame as it is on the wire: encrypted, with a nonce and a checksum.
_CURVE_BYTES = 64
MOST_REQUEST_BYTES = SECRET_BYTES + _REQUEST.size + _LONGEST_NAME + _CURVE_BYTES
MOST_ANSWER_BYTES = BLOCK_BYTES + _CURVE_BYTES


class Answer(NamedTuple):
    """What comes back.

    Attributes:
        error: The system's number; 0 if all is well.
    """

    number: int
    error: int
    content: bytes

    def to_frames(self) -> list[bytes]:
        return [_ANSWER.pack(self.number, self.error), self.content]

    @classmethod
    def of_frames(cls, frames: list[bytes]) -> Answer:
        """Raises ``ValueError`` where it is none."""
        if len(frames) != 2 or len(frames[0]) != _ANSWER.size:
            raise ValueError(f"an answer of {len(frames)} frames")
        number, error = _ANSWER.unpack(frames[0])
        return cls(number, error, frames[1])
