"""Sockets, made in one place: options before bind and connect, checks that libzmq leaves out.

What libzmq takes in silence is refused here: a host that does not resolve, an ipc path that
another process listens on. And a socket is closed only when what it was given has left.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import math
import os
import select
import socket as stdlib_socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import EndpointError, OptionError
from zmq_datasource.messages.schemas import MAX_MESSAGE_BYTES
from zmq_datasource.options import ProxySocketOptions, ReadOptions, SocketOptions, WriteOptions
from zmq_datasource.options.types import Endpoint, ZmqOptions
from zmq_datasource.transport.peers import PeerWatch, socket_type

__all__ = [
    "Connection",
    "OpenSocket",
    "Taken",
    "attach",
    "bytes_received",
    "check_socket_options",
    "connections",
    "count_connections",
    "ended_in_order",
    "find_dead_peers",
    "hang_up",
    "more_frames",
    "new_socket",
]

# Options that this package sets itself, with what to use instead.
_RESERVED = {
    "rcvhwm": "use the option rcvhwm",
    "sndhwm": "use the option sndhwm of a sink; what a source sends is not limited",
    "hwm": "libzmq has no single high-water mark; use rcvhwm or sndhwm",
    "linger": "use the option linger",
    "subscribe": "use the option topics",
    "unsubscribe": "use the option topics",
    "rcvtimeo": "receiving is driven by Spark's triggers",
    "sndtimeo": "use the option sendTimeout",
    "xpub_nodrop": "it is always on, so that drops are counted",
    "xpub_verbose": "it is always on, to count subscribers",
    "xpub_verboser": "subscribers are counted with xpub_verbose",
    "xpub_manual": "with it nobody would ever be subscribed",
    "probe_router": "the acknowledged transport says hello itself, and plain sockets have no use for it",
    "routing_id": "each connection has one of its own; name a Producer with name",
    "identity": "each connection has one of its own; name a Producer with name",
    "router_raw": "ROUTER speaks the acknowledged transport only",
    "router_handover": "each connection has a routing id of its own",
    "router_mandatory": "it belongs to a ROUTER, where it is always on",
    "xpub_manual_last_value": "with it nobody would ever be subscribed",
    "only_first_subscribe": "it would hide subscribers from the count",
    "immediate": "it is off: a task waits for its peers first, and queued messages survive a reconnect",
    "reconnect_stop": "a connection that ends for good takes along what was received and not read",
    "conflate": "it tears messages of several frames; use rcvhwm=1 or sndhwm=1 for a short queue",
}


def new_socket(context: zmq.Context[zmq.Socket[bytes]], options: SocketOptions) -> zmq.Socket[bytes]:
    """A socket with every option set and nothing bound or connected.

    Raises:
        OptionError: libzmq refuses an option; names it.
    """
    kind = {"SUB": zmq.SUB, "PULL": zmq.PULL, "PUSH": zmq.PUSH, "PUB": zmq.XPUB}
    kind |= {"DEALER": zmq.DEALER, "ROUTER": zmq.ROUTER}
    match options:
        case ReadOptions():
            sock = context.socket(kind[options.socket_type])
            # A frame's size is announced by the peer; beyond this it is disconnected. zmq.maxmsgsize
            # comes after it, so a user may set another bound.
            ours = {
                zmq.RCVHWM: options.rcvhwm,
                zmq.LINGER: options.linger,
                zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            }
            if options.socket_type == "SUB":
                # What a SUB sends is subscriptions, and libzmq drops those too beyond the mark.
                ours[zmq.SNDHWM] = 0
        case WriteOptions():
            # An XPUB is a PUB that can hear its subscribers come.
            sock = context.socket(kind[options.socket_type])
            ours = {zmq.SNDHWM: options.sndhwm, zmq.LINGER: options.linger}
            if options.socket_type == "PUB":
                ours |= {zmq.XPUB_NODROP: 1, zmq.XPUB_VERBOSE: 1}
        case ProxySocketOptions():
            sock = context.socket(getattr(zmq, options.socket_type))
            ours = {
                zmq.RCVHWM: options.rcvhwm,
                # What an XSUB sends is subscriptions, and libzmq drops those too beyond the mark.
                zmq.SNDHWM: 0 if options.socket_type == "XSUB" else options.sndhwm,
                zmq.LINGER: options.linger,
                zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            }
        case _:
            raise TypeError(f"no socket for {type(options)}")
    try:
        for option, value in ours.items():
            sock.setsockopt(option, value)
        if any("[" in endpoint.address for endpoint in (*options.connect, *options.bind)):
            sock.setsockopt(zmq.IPV6, 1)
        for name, text in options.zmq.items():
            _set(sock, name, text, options.zmq)
    except BaseException:
        sock.close(linger=0)
        raise
    return sock


def check_socket_options(options: SocketOptions) -> None:
    """Let libzmq judge the options on a socket that is thrown away.

    Raises:
        OptionError: libzmq refuses one; names it.
    """
    with zmq.Context() as context, new_socket(context, options):
        pass


class OpenSocket:
    """A socket of its own context, watched and attached; closed as a whole.

    Args:
        options: What to open.
        prepare: Called with the socket before it is bound or connected.
        check_hosts: Whether to refuse a host that does not resolve, which takes a moment.

    Attributes:
        lost: Whether a connection ended while this closed, and perhaps with something in it.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked; nothing stays open.
    """

    def __init__(
        self,
        options: SocketOptions,
        prepare: Callable[[zmq.Socket[bytes]], None],
        check_hosts: bool = True,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.socket = new_socket(self._context, options)
        except BaseException:
            self._context.term()
            raise
        self.watch = PeerWatch(self._context, self.socket, options)
        self.lost = False
        try:
            prepare(self.socket)
            attach(self.socket, options.bind, options.connect, check_hosts)
        except BaseException:
            self.close(linger=0)
            raise

    @property
    def closed(self) -> bool:
        return bool(self.socket.closed)

    def close(self, linger: int) -> bool:
        """Close, and wait up to ``linger`` milliseconds (-1: for ever) for what is queued.

        libzmq's own linger waits until its queues are empty, but forgets up to 8 kB that it
        has taken from a queue and could not write because the kernel's buffer was full: the
        last messages to a slow consumer. So this waits for the kernel first.

        Returns:
            Whether all of it has left. libzmq does not say, but it closes early only when
            every queue is empty.
        """
        deadline = math.inf if linger < 0 else time.monotonic() + linger / 1000
        with ExitStack() as stack:
            held = [(stack.enter_context(s), ipc) for s, ipc in self.watch.hold()] if linger else []
            cut = self.watch.cut
            written = _wait_until_written([sock for sock, _ in held], deadline)
            left = -1 if linger < 0 else max(0, round((deadline - time.monotonic()) * 1000))
            self.socket.close(left)
            # A connection that is lost while libzmq lingers takes along what was in it, and is not made anew.
            self.watch.follow_to_the_end(deadline)
            self.watch.close()
            self._context.term()
            streams = [sock for sock, ipc in held if ipc]
            read, broken = _end_streams(streams, deadline)
            self.lost = broken or not ended_in_order(held, self.watch.cut - cut)
        return written and read and time.monotonic() < deadline

    def settle(self, patience: float, most: float = math.inf, quiet: float = 0.003) -> bool:
        """Wait until the kernel's queues are empty, and stay so for ``quiet`` seconds.

        libzmq's own queues are empty then too, because it writes as soon as the kernel has room, unless its
        thread did not run for so long; and those of connections that are being made anew are not looked at.

        Args:
            patience: How long to wait without any progress.
            most: How long in all.

        Returns:
            Whether they are, and no connection has ended by then.
        """
        looks = max(_LOOKS, round(quiet / _SHORT_LOOK_SECONDS))
        with ExitStack() as stack:
            held = [(stack.enter_context(sock), ipc) for sock, ipc in self.watch.hold()]
            now = time.monotonic()
            end, deadline, empty, before = now + most, now + patience, 0, None
            while empty < looks:
                unsent = [_unwritten(sock) for sock, _ in held]
                if any(unsent):
                    taken = [
                        _passed(sock, ipc, left)[0] for (sock, ipc), left in zip(held, unsent, strict=True)
                    ]
                    empty = 0
                    if taken != before:
                        before, deadline = taken, time.monotonic() + patience
                    if time.monotonic() >= min(end, deadline):
                        return False
                else:
                    empty += 1
                time.sleep(_SHORT_LOOK_SECONDS)
            return not any(_ended(sock) for sock, _ in held)


# Between looks at the kernel's queue, so that libzmq's own thread gets its turn to fill it again.
_LOOKS, _LOOK_SECONDS, _SHORT_LOOK_SECONDS = 3, 0.005, 0.001


def _wait_until_written(socks: Sequence[stdlib_socket.socket], deadline: float) -> bool:
    """Wait until the kernel has nothing of these connections left to send."""
    empty = 0 if socks else _LOOKS
    while empty < _LOOKS:
        empty = 0 if any(map(_unwritten, socks)) else empty + 1
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _unwritten(sock: stdlib_socket.socket) -> int:
    if _ended(sock, by_reset=True):  # Linux goes on counting what the reset has discarded
        return 0
    try:
        (queued,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    except OSError:  # the peer is gone, or this system cannot tell
        return 0
    return int(queued)


def _end_streams(socks: Sequence[stdlib_socket.socket], deadline: float) -> tuple[bool, bool]:
    """Tell the peers that no more comes, and wait until each has read everything and hangs up.

    A unix socket that is closed tells the other side at once, even if that one still has unread
    data; libzmq then drops the data where the receiver's queue is full (up to 8 kB of what it
    has read, and all that it has not). Over tcp the peer learns of it only when it gets there.

    Returns:
        Whether all have hung up, and whether one did so before it had read everything.
    """
    for sock in socks:
        with suppress(OSError):  # the peer has hung up already
            sock.shutdown(stdlib_socket.SHUT_WR)
    broken = False
    for sock in socks:
        try:
            if not _hung_up(sock, deadline):
                return False, broken
        except OSError:
            broken = True
    return True, broken


def _hung_up(sock: stdlib_socket.socket, deadline: float) -> bool:
    try:
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(None if left == math.inf else left)
            if not sock.recv(4096):
                return True
    except TimeoutError:
        pass
    return False


def ended_in_order(held: Sequence[tuple[stdlib_socket.socket, bool]], ends: int) -> bool:
    """Whether so many connections that have ended took nothing along, seen from the handles on them.

    Over tcp a peer that hangs up after it has read everything ends the stream, and one that leaves something
    unread, or is sent something afterwards, resets it. A unix socket tells the two apart only to the first
    who asks, and that is libzmq.
    """
    over = [sock for sock, ipc in held if not ipc and _ended(sock)]
    _wait_until_written(over, time.monotonic() + _ANSWER_SECONDS)
    return ends <= len(over) and not any(_ended(sock, by_reset=True) for sock in over)


# How long an answer to what was sent into a connection that the peer has ended may take.
_ANSWER_SECONDS = 1.0


def _ended(sock: stdlib_socket.socket, by_reset: bool = False) -> bool:
    poller = select.poll()
    poller.register(sock, 0 if by_reset else getattr(select, "POLLRDHUP", 0))
    return bool(poller.poll(0))


def _set(sock: zmq.Socket[bytes], name: str, value: str, all_options: ZmqOptions) -> None:
    if name in _RESERVED:
        raise OptionError(f"option zmq.{name}: {_RESERVED[name]}")
    option = getattr(zmq.SocketOption, name.upper(), None)
    if option is None:
        raise OptionError(f"option zmq.{name}: libzmq has no socket option of that name; see zmq_setsockopt")
    # repr() of the options hides the value of a secret.
    shown = repr(ZmqOptions({name: all_options[name]}))
    try:
        if option._opt_type.name == "bytes":
            sock.setsockopt(option, value.encode())
        else:
            sock.setsockopt(option, int(value))
    except ValueError as e:
        raise OptionError(f"option zmq.{name}: {shown}: it takes a whole number") from e
    except zmq.ZMQError as e:
        raise OptionError(
            f"option zmq.{name}: {shown}: libzmq refuses it for a {socket_type(sock)} socket: {e.strerror}"
        ) from e
    if name == "reconnect_ivl" and int(value) < 1:
        raise OptionError(
            f"option zmq.{name}: {shown}: without reconnecting, libzmq throws away what it has received from a "
            "connection that ends; use a number of milliseconds"
        )


class Connection(NamedTuple):
    """A connection that is up, as the operating system sees it.

    Attributes:
        inode: Its name.
        unsent: Bytes that wait for the peer.
        taken: Grows with what the peer has taken, or changes at least.
        received: Bytes that have come from it; 0 where the system does not tell (ipc).
    """

    inode: int
    peer: str
    unsent: int
    taken: int
    received: int


def connections(watch: PeerWatch) -> list[Connection]:
    """The connections of a socket, as the operating system sees them."""
    found = []
    for handle, ipc in watch.hold():
        with handle:
            inode = os.fstat(handle.fileno()).st_ino
            unsent = _unwritten(handle)
            taken, received = _passed(handle, ipc, unsent)
            found.append(Connection(inode, _peer_name(handle, ipc), unsent, taken, received))
    return found


def hang_up(watch: PeerWatch, connection: Connection) -> None:
    """End one connection of a socket, which libzmq has no call for. The peer may come again."""
    for handle, _ in watch.hold():
        with handle:
            if os.fstat(handle.fileno()).st_ino == connection.inode:
                with suppress(OSError):  # gone already
                    handle.shutdown(stdlib_socket.SHUT_RDWR)


def _passed(handle: stdlib_socket.socket, ipc: bool, unsent: int) -> tuple[int, int]:
    """Bytes that the peer's system has acknowledged, and that have come.

    Where that is not told: what is left, which changes with it, and 0.
    """
    return (unsent, 0) if ipc else _tcp_bytes(handle) or (unsent, 0)


def _tcp_bytes(handle: stdlib_socket.socket) -> tuple[int, int] | None:
    """What the peer's system has acknowledged, and what was received; None where that is not told."""
    if sys.platform == "linux":
        with suppress(OSError):
            info = handle.getsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_INFO, 192)
            if len(info) >= _BYTES_ACKED + 16:
                acked, received = struct.unpack_from("=QQ", info, _BYTES_ACKED)
                return int(acked), int(received)
    return None


# Where tcpi_bytes_acked is in Linux' struct tcp_info; tcpi_bytes_received follows it.
_BYTES_ACKED = 120


def bytes_received(watch: PeerWatch) -> int:
    """How many bytes have come by the tcp connections that are up; it grows while a large message is on its way."""
    total = 0
    for handle, ipc in watch.hold():
        with handle:
            total += _passed(handle, ipc, 0)[1]
    return total


# A peer whose machine is gone is noticed by tcp itself. libzmq's own heartbeats take a peer for dead that is
# taking one large message: a PING waits in its queue behind that.
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
_UNACKNOWLEDGED_MS = 30_000


def find_dead_peers(sock: zmq.Socket[bytes]) -> None:
    """Have the system notice connections whose other end is gone without a word."""
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(option, value)
    sock.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)


class Taken:
    """How many bytes the other end of one connection has taken, as the operating system sees it.

    libzmq's descriptor is looked at, never held: a copy of it would keep a connection alive that libzmq has closed.

    Args:
        descriptor: The connection's, as ``ZMQ_SRCFD`` of a message tells it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._inode = 0
        with suppress(OSError):  # closed meanwhile
            self._inode = os.fstat(descriptor).st_ino

    def bytes(self) -> int | None:
        """None where the system does not tell: not over ipc, and not of a connection that is gone."""
        with suppress(OSError):
            copy = os.dup(self._descriptor)
            with stdlib_socket.socket(fileno=copy) as handle:
                if os.fstat(copy).st_ino == self._inode:
                    told = _tcp_bytes(handle)
                    return None if told is None else told[0]
        return None


def _peer_name(handle: stdlib_socket.socket, ipc: bool) -> str:
    try:
        if ipc:
            credentials = handle.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_PEERCRED, 12)
            return f"process {int.from_bytes(credentials[:4], sys.byteorder)}"
        host, port, *_ = handle.getpeername()
        return f"{host}:{port}"
    except (OSError, AttributeError):  # hung up meanwhile, or a system that cannot tell
        return "unknown"


def count_connections(counters: SourceCounters, watches: Sequence[PeerWatch]) -> None:
    """Tell who is there, to whoever reads the counters in another thread."""
    counters.connections = sum(watch.peers for watch in watches)
    counters.connections_made = sum(watch.connections for watch in watches)
    counters.connections_lost = sum(watch.lost for watch in watches)
    counters.handshake_failures = sum(watch.failures for watch in watches)
    counters.protocol_errors = sum(watch.protocol_errors for watch in watches)


def attach(
    sock: zmq.Socket[bytes], bind: Iterable[Endpoint], connect: Iterable[Endpoint], check_hosts: bool = True
) -> None:
    """Bind and connect.

    Raises:
        EndpointError: An endpoint is in use, not of this machine, or its host does not resolve.
    """
    for endpoint in bind:
        _refuse_ipc_in_use(endpoint)
        try:
            sock.bind(str(endpoint))
        except zmq.ZMQError as e:
            hints = {
                zmq.EADDRINUSE: "another process has it, or another query of this job; use another port",
                errno.ENODEV: "bind takes an IP address or interface of this machine, or *, and no host name",
                zmq.EADDRNOTAVAIL: "it is not an address of this machine; use * for all of them",
                errno.EACCES: "this user may not; use a port from 1024 on, or another directory",
            }
            hint = hints.get(e.errno or 0)
            raise EndpointError(f"binding {endpoint}: {e.strerror}{f'; {hint}' if hint else ''}") from e
    for endpoint in connect:
        if check_hosts:
            _refuse_unknown_host(endpoint)
        try:
            sock.connect(str(endpoint))
        except zmq.ZMQError as e:
            raise EndpointError(f"connecting to {endpoint}: {e.strerror}; write tcp://host:port") from e


def _refuse_ipc_in_use(endpoint: Endpoint) -> None:
    """libzmq takes over the path of a living listener; ask whether there is one."""
    if endpoint.transport != "ipc":
        return
    address = endpoint.address
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a listener that hangs has a full backlog
        try:
            # "@name" is libzmq's notation for Linux's abstract namespace.
            probe.connect("\0" + address[1:] if address.startswith("@") else address)
        except BlockingIOError:
            pass
        except OSError:  # nobody there, or something that bind will name
            return
    raise EndpointError(f"binding {endpoint}: another process listens there; use another path")


def _refuse_unknown_host(endpoint: Endpoint) -> None:
    if endpoint.transport != "tcp":
        return
    host, port = endpoint.host_port
    try:
        stdlib_socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM)
    except OSError as e:
        raise EndpointError(
            f"connecting to {endpoint}: host {host!r} does not resolve on {stdlib_socket.gethostname()}: "
            f"{e.strerror or e}"
        ) from e


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
