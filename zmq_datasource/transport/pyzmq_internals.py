"""What pyzmq has and does not promise, used for speed; tried with pyzmq 27, else its public way is taken."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq

__all__ = ["MoreFrames", "functions_of_libzmq", "more_frames", "recv_of", "send_of"]


def send_of(sock: zmq.Socket[bytes]) -> Callable[..., object]:
    """``sock.send`` without what pyzmq's Python class does around it for every message."""
    send: Callable[..., object] = super(zmq.Socket, sock).send
    return send


def recv_of(sock: zmq.Socket[bytes]) -> Callable[..., Any]:
    """``sock.recv`` without what pyzmq's Python class does around it for every message."""
    recv: Callable[..., Any] = super(zmq.Socket, sock).recv
    return recv


# In the order in which _core.c takes them.
_FUNCTIONS = (
    *(
        "zmq_msg_init",
        "zmq_msg_recv",
        "zmq_msg_data",
        "zmq_msg_size",
        "zmq_msg_more",
        "zmq_msg_get",
        "zmq_msg_close",
    ),
    *("zmq_send", "zmq_getsockopt", "zmq_errno"),
)


def functions_of_libzmq() -> tuple[int, ...] | None:
    """The addresses of what the compiled core calls of pyzmq's own libzmq; None if they cannot be had."""
    if zmq.zmq_version_info()[0] != 4:  # its messages may have another size
        return None
    try:
        from zmq.backend.cython import _zmq  # noqa: PLC0415 - pyzmq on PyPy has no such module

        # The extension module is linked with libzmq, so its symbols are found through it.
        library = ctypes.CDLL(_zmq.__file__)
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    except (ImportError, AttributeError, OSError):
        return None
    return tuple(address for address in addresses if address)


class MoreFrames(NamedTuple):
    """``ask()``, then read ``flag.value``: whether the frame just received is followed by another."""

    ask: Callable[[], object]
    flag: ctypes.c_int


def more_frames(sock: zmq.Socket[bytes]) -> MoreFrames:
    """How to ask a socket for further frames, as cheaply as can be.

    ``sock.getsockopt(RCVMORE)`` looks its option up in an enum on every call and costs about
    four times the ``recv`` itself; asking libzmq through ctypes costs less than one.
    """
    flag, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    try:
        from zmq.backend.cython import _zmq  # noqa: PLC0415 - pyzmq on PyPy has no such module

        # The extension module is linked with libzmq, so its symbols are found through it.
        # PyDLL keeps the GIL, which is right for a call that reads one flag.
        getsockopt = ctypes.PyDLL(_zmq.__file__).zmq_getsockopt
    except (ImportError, AttributeError, OSError):  # cffi backend, or symbols that are not exported

        def ask() -> None:
            flag.value = int(sock.getsockopt(zmq.RCVMORE))

        return MoreFrames(ask, flag)
    # References and plain numbers are what ctypes converts fastest. The one error that this
    # call can have, a socket that is closed, is raised by the recv that follows.
    handle = ctypes.byref(ctypes.c_char.from_address(sock.underlying))
    return MoreFrames(
        functools.partial(getsockopt, handle, int(zmq.RCVMORE), ctypes.byref(flag), ctypes.byref(size)), flag
    )
