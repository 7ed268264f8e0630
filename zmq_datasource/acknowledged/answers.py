"""The answers of the receiving side, and refusals with their reasons for messages that cannot be obeyed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zmq_datasource.acknowledged.committer import UnknownAttemptError
from zmq_datasource.acknowledged.protocol import CONFLICT, INTERNAL, UNKNOWN, Message, Refusal, encode
from zmq_datasource.acknowledged.transactions import ConflictError
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogError, ProtocolError, SocketError
from zmq_datasource.host.log_lines import LimitedLog

__all__ = ["Answers", "RefusedError"]


class RefusedError(SocketError):
    """A sender's message cannot be obeyed. ``code`` is for programs (docs/protocol.md)."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Answers:
    """Answers to senders, collected until the socket sends them.

    Args:
        counters: Counts malformed messages and unexpected errors.
        abandon: Called with the attempt of a message that has met an unexpected error, and may be half done.
    """

    def __init__(self, counters: SourceCounters, abandon: Callable[[str | None], None]) -> None:
        self._counters = counters
        self._abandon = abandon
        self._answers: list[tuple[bytes, list[Any]]] = []
        self._refusals = LimitedLog(__name__, "refusals")
        self._faults = LimitedLog(__name__, "unexpected errors")

    def add(self, peer: bytes, message: Message) -> None:
        self._answers.append((peer, encode(message)))

    def take(self) -> list[tuple[bytes, list[Any]]]:
        """The answers since the last call: to which peer, and the frames."""
        answers, self._answers = self._answers, []
        return answers

    @contextmanager
    def refusing(self, peer: bytes, attempt: str | None = None) -> Iterator[None]:
        """Turn an error in this block into a refusal to the peer.

        Raises:
            LogError: The log has failed, which is not about one message.
        """
        try:
            yield
        except UnknownAttemptError as e:
            self._refuse(peer, UNKNOWN, str(e), attempt)
        except ConflictError as e:
            self._refuse(peer, CONFLICT, str(e), attempt)
        except RefusedError as e:
            self._refuse(peer, e.code, str(e), attempt)
        except ProtocolError as e:
            self._counters.malformed += 1
            self._refuse(peer, "protocol", str(e), attempt)
        except LogError:
            raise
        except Exception as e:
            self._counters.internal_errors += 1
            self._faults.fault("an unexpected error at a message of the transaction protocol: %r", e, error=e)
            self._abandon(attempt)
            reason = f"an unexpected error of the receiver ({type(e).__name__}), which its log explains"
            self._refuse(peer, INTERNAL, reason, attempt)

    def _refuse(self, peer: bytes, code: str, reason: str, attempt: str | None) -> None:
        self._refusals.warn("refused a message of the transaction protocol: %s", reason)
        self.add(peer, Refusal(code=code, reason=reason, attempt=attempt))

    def flush(self) -> None:
        """Log how many lines were left out, if it is time. Call it often."""
        self._refusals.flush()
        self._faults.flush()
