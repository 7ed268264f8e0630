"""A peer that means harm, drawn from a seed: bytes on the wire, from noise to whole sessions with a bit changed."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from tests.fuzz.seeds import CORPUS
from tests.fuzz.targets import frames_of
from zmq_datasource.options.socket import Endpoint

__all__ = ["Attacker", "greeting", "message", "ready", "shake_hands"]

# ZMTP 3.1 (RFC 37).
_MORE, _LONG, _COMMAND = 1, 2, 4


def greeting(mechanism: bytes = b"NULL") -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + b"\3\1" + mechanism.ljust(20, b"\0") + bytes(32)


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + struct.pack(">Q", len(body)) + body


def ready(socket_type: bytes) -> bytes:
    def of(name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value

    return _frame(_COMMAND, b"\5READY" + of(b"Socket-Type", socket_type) + of(b"Identity", b""))


def message(frames: Sequence[bytes]) -> bytes:
    *before, last = frames
    return b"".join(_frame(_MORE, frame) for frame in before) + _frame(0, last)


def shake_hands(sock: socket.socket, socket_type: bytes) -> None:
    """Greet, and wait for the answer: libzmq refuses messages that come earlier."""
    sock.sendall(greeting() + ready(socket_type))
    answer = b""
    while b"READY" not in answer:
        more = sock.recv(65536)
        assert more, "the other side has hung up"
        answer += more


class Attacker:
    """Attacks one endpoint, connection after connection.

    Args:
        endpoint: Of tcp.
        peer: The type of socket that the one there talks to.
        kept: Names of fuzzing targets, whose inputs are the content of its messages; subscriptions if there are none.
        seed: Draws everything.

    Attributes:
        frames: How many were sent behind a whole handshake.
    """

    def __init__(self, endpoint: str, peer: bytes, kept: Sequence[str], seed: int) -> None:
        self._address = Endpoint.read(endpoint).host_port
        self._peer = peer
        self._random = random.Random(seed)
        self._contents = [
            frames_of(path.read_bytes()) for name in kept for path in sorted((CORPUS / name).iterdir())
        ] or [[b"\1topic"], [b"\0topic"], [b"\1"]]
        self.frames = 0

    def attack(self, times: int, messages: int = 20) -> None:
        """So many connections, some of which stay open until the end."""
        silent: list[socket.socket] = []
        try:
            for _ in range(times):
                kind = self._random.choice(
                    (
                        self._noise,
                        self._noise_behind_a_greeting,
                        self._content,
                        self._content,
                        self._flipped,
                        None,
                    )
                )
                sock = socket.create_connection(self._address, timeout=10)
                if kind is None:  # half a handshake, and then nothing
                    with suppress(OSError):
                        sock.sendall(greeting()[: self._random.randrange(64)])
                    silent.append(sock)
                else:
                    self._send(sock, kind, messages)
        finally:
            for sock in silent:
                sock.close()

    def _send(self, sock: socket.socket, kind: Callable[[int], Iterator[bytes]], messages: int) -> None:
        resets = self._random.random() < 0.3
        with sock, suppress(OSError):  # hung up on
            if resets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            *before, last = kind(messages)
            for (
                part
            ) in before:  # a handshake, whose end is waited for: libzmq refuses messages that come earlier
                sock.sendall(part)
                answer = b""
                while b"READY" not in answer and (more := sock.recv(65536)):
                    answer += more
            sock.sendall(last)
            if not resets:  # what is closed with something unread resets, too
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass

    def _noise(self, _messages: int) -> Iterator[bytes]:
        yield self._random.randbytes(self._random.randrange(1, 500))

    def _noise_behind_a_greeting(self, _messages: int) -> Iterator[bytes]:
        yield greeting(self._random.choice((b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", b"")))
        yield self._random.randbytes(self._random.randrange(1, 500))

    def _session(self, messages: int) -> bytes:
        sent = []
        for _ in range(messages):
            frames = self._frames()
            self.frames += len(frames)
            sent.append(message(frames))
        return b"".join(sent)

    def _frames(self) -> list[bytes]:
        draw = self._random
        frames = list(draw.choice(self._contents))
        for _ in range(draw.randrange(3)):
            at = draw.randrange(len(frames))
            match draw.randrange(5):
                case 0:
                    frames[at] = draw.randbytes(draw.randrange(300))
                case 1:
                    frames.insert(at, draw.randbytes(draw.randrange(20)))
                case 2 if len(frames) > 1:
                    del frames[at]
                case 3 if frames[at]:
                    body = bytearray(frames[at])
                    body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
                    frames[at] = bytes(body)
                case _:
                    frames[at] = frames[at][: draw.randrange(len(frames[at]) + 1)]
        return frames

    def _content(self, messages: int) -> Iterator[bytes]:
        """Valid ZMTP, and what no honest peer says."""
        yield greeting() + ready(self._peer)
        yield self._session(messages)

    def _flipped(self, messages: int) -> Iterator[bytes]:
        """A session in which a few bits are wrong."""
        session = bytearray(self._session(messages))
        for _ in range(self._random.randrange(1, 5)):
            session[self._random.randrange(len(session))] ^= 1 << self._random.randrange(8)
        yield greeting() + ready(self._peer)
        yield bytes(session)
