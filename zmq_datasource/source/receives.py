"""What a process receives into a log, and how: recorded in the log's head, and compared by the next process.

The record has the text of each option about sockets, messages and the writing of the log, without secrets. The rules:

* While another process receives, a query with other values is refused: its options would have no effect. A query that
  only reads sets none of them.
* When no process receives, the next one records its own values, and logs which ones are new.
* Another framing or socket type, or topics of which none stays, are refused if the log has messages: the rows of one
  log would mean different things.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from zmq_datasource.errors import LogLockedError, OptionError
from zmq_datasource.log import LogStorage, read_head
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import Role, ZmqOptions, describe
from zmq_datasource.options.socket import Endpoints
from zmq_datasource.options.types import Duration, Topics

_log = logging.getLogger(__name__)

_ALWAYS = ("connect", "bind", "allowed_clients")
# A change of these options would mix messages of different kinds in one log.
_KINDS = ("socketType", "framing")


def received_by(options: StreamReadOptions) -> dict[str, str]:
    """All options about receiving as text, by name."""
    return {
        option.name: _text(getattr(options, option.field))
        for option in describe(type(options))
        if option.field in _ALWAYS or option.roles & {Role.SOCKET, Role.WRITER}
    } | {"zmq.*": _text(options.zmq)}


def _text(value: object) -> str:
    match value:
        case None:
            return ""
        case Duration():
            return f"{value:g}s"
        case ZmqOptions():
            return repr(ZmqOptions(sorted(value.items()))) if value else ""  # without secrets
        case Topics() | Endpoints():  # their order has no effect
            return ",".join(sorted(map(str, value)))
    return str(value)


def _differing(theirs: dict[str, str], ours: dict[str, str]) -> dict[str, str]:
    return {name: theirs[name] for name in ours if name in theirs and theirs[name] != ours[name]}


def take_up(
    storage: LogStorage, options: StreamReadOptions, before: dict[str, str], end: int
) -> dict[str, str]:
    """What this process receives from now on. Logs what differs from before. Called with the log's lock.

    Args:
        before: What the last writer has received.
        end: The end of the log.

    Raises:
        OptionError: The log has messages of another kind.
    """
    ours = received_by(options)
    if not end:
        return ours
    differing = _differing(before, ours)
    changed = {name: text for name, text in differing.items() if name in _KINDS}
    if "topics" in differing and not _overlap(before["topics"].split(","), options.topics):
        changed["topics"] = before["topics"]
    if changed:
        raise OptionError(
            f"receiving {_described(ours, changed, 'in the log')} into {storage}: the rows of one log would be of two "
            "kinds. Set another walLocation (or walStore), and a new checkpointLocation"
        )
    if differing:
        _log.warning("%s is received with new options: %s", storage, _described(ours, differing, "before"))
    return ours


def _overlap(before: Iterable[str], now: Iterable[str]) -> bool:
    """Whether a message can match topics of both."""
    now = list(now)
    return any(one.startswith(other) or other.startswith(one) for one in before for other in now)


def refusal(
    storage: LogStorage, options: StreamReadOptions, unknown: LogLockedError | None = None
) -> LogLockedError | None:
    """Why this process cannot wait for the one that fills the log; None if both receive the same.

    Args:
        unknown: The answer if that process has not recorded what it receives.

    Raises:
        LogError: The record cannot be read.
    """
    ours, theirs = received_by(options), read_head(storage.store).receives
    if not theirs:
        return unknown
    if not (differing := _differing(theirs, ours)):
        return None
    place = "walStore" if options.wal_store is not None else "walLocation"
    return LogLockedError(
        f"receiving into {storage}: it is filled with other options by {storage.writer() or 'another process'}: "
        f"{_described(ours, differing, 'there')}. Set the same values; or only read what it receives, "
        f"with {place}={storage.root} and no option of the socket or of receiving; or set another {place}"
    )


def _described(ours: Mapping[str, str], theirs: Mapping[str, str], whose: str) -> str:
    return ", ".join(
        f"{name}={ours[name] or 'not set'} ({whose}: {text or 'not set'})" for name, text in theirs.items()
    )
