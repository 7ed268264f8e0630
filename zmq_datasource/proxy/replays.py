"""vLLM's replay protocol, from the publisher's side: its requests are FETCHes of a range without a name.

A client asks once for a whole range. So each BATCH of it is followed by the FETCH of what comes next, and a BATCH
without rows is the end of the range. What the log no longer has is left out, as by any publisher.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pyarrow as pa

from zmq_datasource.errors import ProtocolError
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.messages.framing.fields import UnfitError
from zmq_datasource.messages.framing.replay import TOPIC_WANTED, end_of_replay, read_request, reply
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.fetch_protocol import Batch, Fetch, FromProxy, Lost
from zmq_datasource.proxy.fetch_wire import FetchWire
from zmq_datasource.proxy.router import Router
from zmq_datasource.proxy.waiting import Owner
from zmq_datasource.transport.core import Outbox, SameColumn, columns_of

__all__ = ["ReplayWire"]

# Of the messages that wait for one client, about; or one message.
_BATCH_BYTES = 1 << 20
_MOST_REQUEST_BYTES, _MOST_REQUEST_FRAMES = 1024, 2
# The server bounds what is on its way to a client.
_SNDHWM = 0


class ReplayWire(FetchWire):
    """vLLM's replay protocol.

    Attributes:
        requests, sent: How many requests and messages there were so far.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    look_ms = 2

    def __init__(self, options: ProxyOptions) -> None:
        self.router = Router(options, options.replay, _SNDHWM, _MOST_REQUEST_BYTES, _MOST_REQUEST_FRAMES)
        self.requests = 0
        self.sent = 0

    def read(self, frames: Sequence[bytes]) -> tuple[Fetch, Sequence[bytes]]:
        try:
            start, end = read_request(frames)
        except UnfitError as e:
            raise ProtocolError(str(e)) from None
        self.requests += 1
        return Fetch(first=start, until=end, max_bytes=_BATCH_BYTES), ()

    def send(
        self, peer: bytes, answer: FromProxy, owner: Owner | None = None, rows: pa.RecordBatch | None = None
    ) -> bool:
        answers, with_topic = self.router.answers, peer.startswith(TOPIC_WANTED)
        if rows is None:
            # The protocol has no word for what was lost, nor for a refusal.
            return not isinstance(answer, Batch) or answers.send(peer, end_of_replay(with_topic), owner)
        messages, first, last = raw_messages(rows), rows.column("id")[0].as_py(), rows.num_rows - 1
        columns = columns_of(messages, first)[0 if with_topic else 1 :]
        outbox = Outbox([SameColumn(peer), SameColumn(b""), *columns], rows.num_rows)
        self.sent += rows.num_rows
        # The last reply tells when all have left.
        return answers.send_rows(outbox, last) and answers.send(
            peer, reply(first + last, messages.message(last), with_topic), owner, rows.nbytes
        )

    def after(self, fetch: Fetch, answer: Batch | Lost) -> Fetch | None:
        if isinstance(answer, Batch) and not answer.rows:
            return None
        until = answer.end if fetch.until is None else min(fetch.until, answer.end)
        return msgspec.structs.replace(fetch, first=answer.next, until=until)
