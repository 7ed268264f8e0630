"""A peer that means harm, drawn from a seed: bytes on the wire, from noise to whole sessions with a bit changed."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from tests.fuzz.seeds import CORPUS
from tests.fuzz.targets import frames_of
from zmq_datasource.options.socket import Endpoint

__all__ = ["attack", "greeting", "message", "ready", "shake_hands"]

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


def attack(endpoint: str, peer: bytes, kept: str, seed: int, times: int, messages: int) -> int:
    """Attack an endpoint of tcp by so many connections, some of which stay open until the end.

    Args:
        peer: The type of socket that the one there talks to.
        kept: The fuzzing target whose inputs are the content of messages; subscriptions if it is empty.
        seed: Draws everything.

    Returns:
        How many frames were sent behind a whole handshake.
    """
    attacker = _Attacker(peer, kept, seed)
    with ExitStack() as silent:
        for _ in range(times):
            sock = socket.create_connection(Endpoint.read(endpoint).host_port, timeout=10)
            if parts := attacker.draw_connection(messages):
                attacker.send(sock, parts)
            else:  # half a handshake, and then nothing
                silent.enter_context(sock)
                with suppress(OSError):
                    sock.sendall(greeting()[: attacker.random.randrange(64)])
    return attacker.frames


class _Attacker:
    def __init__(self, peer: bytes, kept: str, seed: int) -> None:
        self.random, self.frames = random.Random(seed), 0
        self._peer = peer
        self._contents = [[b"\1topic"], [b"\0topic"], [b"\1"]]
        if kept:
            self._contents = [frames_of(path.read_bytes()) for path in sorted((CORPUS / kept).iterdir())]

    def draw_connection(self, messages: int) -> list[bytes]:
        """What one connection sends: noise, perhaps behind a greeting, or valid ZMTP, perhaps with bits changed."""
        hello = greeting() + ready(self._peer)
        match self.random.randrange(6):
            case 0:
                return [self._noise()]
            case 1:
                return [
                    greeting(self.random.choice((b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", b""))),
                    self._noise(),
                ]
            case 2 | 3:
                return [hello, self._session(messages)]
            case 4:
                session = bytearray(self._session(messages))
                for _ in range(self.random.randrange(1, 5)):
                    session[self.random.randrange(len(session))] ^= 1 << self.random.randrange(8)
                return [hello, bytes(session)]
        return []

    def send(self, sock: socket.socket, parts: list[bytes]) -> None:
        """Send one part after the other, each but the first once a handshake was answered; then end, or reset."""
        resets = self.random.random() < 0.3
        with sock, suppress(OSError):  # hung up on
            if resets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            *before, last = parts
            for part in before:
                sock.sendall(part)
                answer = b""
                while b"READY" not in answer and (more := sock.recv(65536)):
                    answer += more
            sock.sendall(last)
            if not resets:  # what is closed with something unread resets, too
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass

    def _noise(self) -> bytes:
        return self.random.randbytes(self.random.randrange(1, 500))

    def _session(self, messages: int) -> bytes:
        sent = [self._frames() for _ in range(messages)]
        self.frames += sum(map(len, sent))
        return b"".join(map(message, sent))

    def _frames(self) -> list[bytes]:
        draw = self.random
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
