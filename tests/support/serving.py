"""A receiver that serves durable subscribers, in threads of the test's own process: real sockets and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from tests.support import Socket, free_endpoint, log_at, log_options, wait_for
from zmq_datasource import DurableSubscriber
from zmq_datasource.log.leases import Lease, LeaseFiles, subscriber_key
from zmq_datasource.options import ReceiveOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.serving import protocol
from zmq_datasource.serving.durable import DurableServer
from zmq_datasource.serving.protocol import Batch, Fetch, FromClient, FromServer, Open, Opened, Refused
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.transport.spec import SocketSpec


class Serving:
    """A receiver with a PULL socket and a durable side.

    Attributes:
        pull, durable: The endpoints.
    """

    def __init__(self, location: Path | str, durable: str | None = None, **options: Any) -> None:
        self.location = location
        self.pull, self.durable = free_endpoint(), durable or free_endpoint()
        given = {"socketType": "PULL", "bind": self.pull, "durable": self.durable, **log_options(location)}
        text = {name: str(value) for name, value in {**given, **options}.items()}
        self._options = parse(ReceiveOptions, text)

    def __enter__(self) -> Self:
        self.receiver = FeedReceiver(self._options, side=self._serve)
        self.receiver.start()
        return self

    def _serve(self, receiver: FeedReceiver) -> DurableServer:
        spec, expiry = SocketSpec.of_durable(self._options), self._options.subscriber_expiry
        given = receiver.storage, receiver.log, receiver.await_rows
        self.server = DurableServer(spec, *given, expiry)
        return self.server

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.receiver.stop()

    def feed(self, context: zmq.Context[Socket], *messages: list[bytes]) -> None:
        """Send messages, and wait until they are in the log."""
        push = context.socket(zmq.PUSH)
        push.connect(self.pull)
        end = self.receiver.received_end + len(messages)
        for message in messages:
            push.send_multipart(message)
        wait_for(lambda: self.receiver.seal() == end, "the messages in the log")
        push.close(1000)

    def account(self, name: str) -> dict[str, Any]:
        """The newest figures of a durable subscriber."""
        return next((dict(a) for a in self.server.accounts if a["name"] == name), {})

    def lease(self, name: str) -> Lease:
        """The lease of a durable subscriber on the disk."""
        found = LeaseFiles(log_at(self.location)).read(subscriber_key(name))
        assert found is not None
        return found


class Client:
    """A client of a durable endpoint that sends exactly the messages of a test.

    Args:
        options: Of its DEALER, as in ``rcvhwm=1``.
    """

    def __init__(self, context: zmq.Context[Socket], endpoint: str, **options: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name.upper()), value)
        self.socket.connect(endpoint)

    def send(self, message: FromClient, topics: Sequence[bytes] = ()) -> None:
        self.socket.send_multipart(protocol.encode(message, topics))

    def receive(self, milliseconds: int = 30_000) -> tuple[FromClient | FromServer, Sequence[bytes]]:
        """The next message, and the frames behind its header."""
        assert self.socket.poll(milliseconds), "the server does not answer"
        return protocol.decode(self.socket.recv_multipart())

    def open(self, name: str, session: int = 1, topics: Sequence[bytes] = (), **header: Any) -> Opened:
        """Open a name. Answers to earlier requests are left out."""
        self.send(Open(name=name, session=session, **header), topics)
        while True:
            message, _ = self.receive()
            assert not isinstance(message, Refused), message
            if isinstance(message, Opened) and message.session == session:
                return message

    def fetch(self, name: str, first: int, session: int = 1, **header: Any) -> tuple[Batch, list[bytes]]:
        """Fetch messages from an id on; return the answer, and the last frame of each message."""
        self.send(Fetch(name=name, session=session, first=first, **{"done": first, **header}))
        return self.batch()

    def batch(self) -> tuple[Batch, list[bytes]]:
        """The next answer, which is a BATCH, and the last frame of each of its messages."""
        message, buffers = self.receive()
        assert isinstance(message, Batch), message
        return message, protocol.unpack_rows(message, buffers)["value"].to_pylist()

    def refused(self) -> Refused:
        """The next REFUSED; other answers before it are left out."""
        while True:
            message, _ = self.receive()
            if isinstance(message, Refused):
                return message


def take(subscriber: DurableSubscriber, count: int) -> list[bytes]:
    """The values of the next messages."""
    values: list[bytes] = []
    for _ in range(count):
        message = subscriber.receive(30)
        assert message is not None, values
        values.append(message.value)
    return values
