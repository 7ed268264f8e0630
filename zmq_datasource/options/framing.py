"""Options about the frames and sequences of messages, and about messages that are malformed or missing.

A preset of ``framing`` says where topic, publisher, sequence and value are, and how its publishers count
(``Numbering``). With ``custom``, options say both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from msgspec import Meta

from zmq_datasource.errors import OptionError
from zmq_datasource.options.parser import Role, doc
from zmq_datasource.options.socket import Endpoints, SocketOptions
from zmq_datasource.options.types import (
    CountedBy,
    Delimiter,
    Duration,
    JsonPath,
    Location,
    ReplayFrom,
)

__all__ = ["FramingOptions", "Numbering"]


class Numbering(NamedTuple):
    """How publishers number their messages, for ``sequences``, which tracks them.

    Attributes:
        by: What has a counter of its own: some of ``publisher``, ``topic`` and ``endpoint``.
        start: The first sequence of a counter.
        end: The last sequence, after which the counter starts again; None if there is no last one.
        restarts: Whether a publisher that starts again keeps its name and counts from ``start``. If not, a lower
            sequence never means a restart.
        window: A sequence that is at most this far behind is late or a duplicate, and not a restart.
        whole: Whether publishers are short-lived, so that messages before the first received one are missing, too.
    """

    by: tuple[str, ...]
    start: int = 0
    end: int | None = None
    restarts: bool = True
    window: int = 1000
    whole: bool = False

    def is_like(self, other: Numbering) -> bool:
        """Whether counters have the same meaning. The rules for restarts may differ."""
        return (self.by, self.start, self.end) == (other.by, other.start, other.end)


class _Preset(NamedTuple):
    """How the publishers of a framing count. The places of its fields are in ``messages.framing``.

    Attributes:
        numbering: How they count; None if they do not.
        nameless: Whether messages lack the name of their publisher.
        unnumbered: Why messages have no numbers, for errors.
    """

    numbering: Numbering | None
    nameless: bool = False
    unnumbered: str = ""


_PRESETS = {
    "sequenced": _Preset(Numbering(("publisher",), restarts=False, whole=True)),
    "vllm": _Preset(Numbering(("endpoint", "topic")), nameless=True),
    "bitcoin": _Preset(Numbering(("endpoint", "topic"), end=2**32 - 1), nameless=True),
    "clone": _Preset(Numbering(("endpoint",), start=1), nameless=True),
    "dafka": _Preset(Numbering(("publisher", "topic"), restarts=False)),
    "jupyter": _Preset(None, unnumbered="Jupyter's msg_id is no number"),
}
_PLAIN = _Preset(None, unnumbered="plain framing has no sequences")


# How a message's frames carry its fields, at the source.
Framing: TypeAlias = Literal["plain", "sequenced", "vllm", "bitcoin", "clone", "dafka", "jupyter", "custom"]

# The framings of other programs.
_FOREIGN = ", ".join(f"`{name}`" for name in _PRESETS if name != "sequenced")


def _plain(text: str, *roles: Role, **constraints: Any) -> Meta:
    return doc(text, Role.SOCKET, Role.UNACKNOWLEDGED, *roles, **constraints)


def _custom(text: str, *roles: Role, **constraints: Any) -> Meta:
    return _plain(text, Role.CUSTOM, *roles, **constraints)


def _binary(text: str, **constraints: Any) -> Meta:
    return _custom(text, Role.SEQUENCE, Role.BINARY, **constraints)


def _numbered(text: str, **constraints: Any) -> Meta:
    return _plain(text, Role.NUMBERED, **constraints)


class FramingOptions(SocketOptions, frozen=True, kw_only=True, rename="camel"):
    """The options of a source about frames, sequences and replays."""

    framing: Annotated[
        Framing,
        _plain(
            "Where the topic, publisher, sequence and value are in a message: `plain`, `sequenced` (this package's "
            f"sink), {_FOREIGN}, or `custom` with the options below. See docs/sequences.md."
        ),
    ] = "plain"
    topic_delimiter: Annotated[
        Delimiter | None,
        _plain(
            "What separates the topic from the value in messages of a single frame: a space, `:`, `\\0`, or other "
            "bytes. Such a message is read as if topic and value had come in two frames: the topic is the part before "
            "the first delimiter. A message of several frames, or without the delimiter, stays as it is."
        ),
    ] = None
    on_malformed: Annotated[
        Literal["skip", "fail"],
        _plain(
            "What happens to a message that does not fit the framing. `skip` counts and logs it, and keeps it at "
            "`deadLetterLocation`. `fail` keeps it, too, and stops the query."
        ),
    ] = "skip"
    dead_letter_location: Annotated[
        Location | None,
        _plain(
            "Where messages that do not fit the framing are kept, with the reason and all frames. They are Parquet "
            "files at a path or URI of a file system that pyarrow knows (`file`, `s3`, `gs`, `hdfs`). If it is not "
            "set, a query keeps up to 64 MiB of them beside the log, in `<log>/<partition>/dead-letters`."
        ),
    ] = None
    topic_frame: Annotated[
        int | None,
        _custom(
            "`custom`: the number of the frame that is the topic. Numbers start at 0, and negative ones count "
            "from the end."
        ),
    ] = None
    publisher_frame: Annotated[
        int | None, _custom("`custom`: the number of the frame that names the publisher.")
    ] = None
    value_frame: Annotated[
        int | None,
        _custom(
            "`custom`: the number of the frame that is the value. If it is not set, it is the last frame."
        ),
    ] = None
    value_offset: Annotated[
        int, _custom("`custom`: the number of bytes before the value in its frame.", ge=0)
    ] = 0
    sequence_frame: Annotated[
        int | None, _custom("`custom`: the number of the frame that contains the sequence.")
    ] = None
    sequence_offset: Annotated[
        int, _binary("`custom`: the number of bytes before the sequence in its frame.", ge=0)
    ] = 0
    sequence_width: Annotated[
        int, _binary("`custom`: the number of bytes of the sequence, 4 or 8.", ge=4, le=8)
    ] = 8
    sequence_endian: Annotated[
        Literal["big", "little"], _binary("`custom`: the byte order of the sequence, `big` or `little`.")
    ] = "big"
    sequence_signed: Annotated[bool, _binary("`custom`: whether the sequence is a signed number.")] = False
    sequence_path: Annotated[
        JsonPath | None,
        _custom(
            "`custom`: the place of the sequence in the JSON text of `sequenceFrame`, such as `frameNumber` "
            "or `header.frame`. It is then not in bytes.",
            Role.SEQUENCE,
        ),
    ] = None
    sequence_by: Annotated[
        CountedBy | None,
        _plain(
            "What has a counter of its own: `publisher`, `topic`, `endpoint`, or several of them separated by commas. "
            "With `none` there are no counters. If it is not set, the framing decides. For `custom` it is the "
            "publisher if there is one, and otherwise the endpoint."
        ),
    ] = None
    sequence_start: Annotated[
        int | None,
        _numbered(
            "The first sequence of a counter. If it is not set, the framing decides. For `custom` it is 0."
        ),
    ] = None
    sequence_end: Annotated[
        int | None,
        _numbered(
            "The last sequence of a counter. After it the counter continues with `sequenceStart`. If it is not "
            "set, the framing decides. For `custom` there is no last one."
        ),
    ] = None
    sequence_restart: Annotated[
        Literal["start", "never"] | None,
        _numbered(
            "What a lower sequence can mean. `start`: the publisher has started again, if the sequence is "
            "`sequenceStart`, if it is more than `sequenceWindow` behind, or if it came by a new connection and "
            "messages are counted by endpoint. `never`: a publisher that starts again has "
            "a new name. If it is not set, the framing decides. For `custom` it is `start`."
        ),
    ] = None
    sequence_window: Annotated[
        int | None,
        _numbered(
            "A sequence that is at most this far behind is late or a duplicate. If it is not set, it is 1000.",
            ge=1,
            le=2**31 - 1,
        ),
    ] = None
    deduplicate: Annotated[
        bool,
        _numbered(
            "If true, a message is left out if its publisher and sequence have come before. This trusts the "
            "publisher that equal numbers mean equal messages."
        ),
    ] = False
    on_loss: Annotated[
        Literal["count", "warn", "fail"],
        _numbered(
            "What happens when sequences are missing: they are counted (`count`), counted and logged "
            "(`warn`), or the query fails (`fail`). When you start it again, it continues after the loss. With "
            "`replayEndpoint`, only messages that could not be fetched count as missing."
        ),
    ] = "warn"
    max_publishers: Annotated[
        int,
        doc(
            "The maximum number of counters, or with `ROUTER` of producers whose last transaction is remembered. When "
            "there are more, the one that was not used for the longest time is forgotten.",
            Role.SOCKET,
            ge=1,
            le=10_000_000,
        ),
    ] = 10_000
    max_gaps: Annotated[
        int,
        _numbered(
            "The maximum number of rows of the gap table. When there are more, the oldest is forgotten.",
            ge=1,
            le=10_000_000,
        ),
    ] = 10_000
    replay_endpoint: Annotated[
        Endpoints,
        _numbered(
            "The replay socket (ROUTER, vLLM's protocol) of each publisher in `connect`, in the same order. "
            "Missing messages are requested there, and when the feed is silent, also what follows the last "
            "one."
        ),
    ] = Endpoints()
    replay_from: Annotated[
        ReplayFrom | None,
        _numbered(
            "Where a query without a history starts: at the `earliest` message that the publisher has, or at "
            "a sequence."
        ),
    ] = None
    replay_timeout: Annotated[
        Duration,
        _numbered(
            "How long a replay may be silent before the request is repeated. Three requests in all are sent."
        ),
    ] = Duration(5)

    @property
    def numbering(self) -> Numbering | None:
        """How messages are counted; None if nothing is tracked."""
        preset = self._preset.numbering
        if preset is None or self.sequence_by == ():
            return None
        return Numbering(
            by=preset.by if self.sequence_by is None else self.sequence_by,
            start=preset.start if self.sequence_start is None else self.sequence_start,
            end=preset.end if self.sequence_end is None else self.sequence_end,
            restarts=preset.restarts if self.sequence_restart is None else self.sequence_restart == "start",
            window=preset.window if self.sequence_window is None else self.sequence_window,
            whole=preset.whole,
        )

    @property
    def _preset(self) -> _Preset:
        nameless = self.publisher_frame is None
        if self.framing == "custom" and self.sequence_frame is None:
            return _Preset(None, nameless, "sequenceFrame is not set")
        if self.framing == "custom":
            return _Preset(Numbering(("endpoint",) if nameless else ("publisher",)), nameless)
        if self.framing == "vllm" and self.replay_endpoint:
            # There is one publisher for each endpoint, and a replayed message does not always have its topic.
            return _Preset(Numbering(("endpoint",)), nameless=True)
        return _PRESETS.get(self.framing, _PLAIN)

    def check(self) -> None:
        super().check()
        if self.framing != "custom":
            self.refuse(
                self.of_role(Role.CUSTOM), f"is for framing=custom; framing={self.framing} knows its layout"
            )
        elif self.sequence_frame is None:
            self.refuse(
                self.of_role(Role.SEQUENCE), "needs sequenceFrame, the frame that contains the sequence"
            )
        if self.sequence_width not in (4, 8):
            raise OptionError(f"sequenceWidth={self.sequence_width}: a sequence has 4 or 8 bytes")
        if self.sequence_path is not None:
            self.refuse(
                self.of_role(Role.BINARY),
                "is for a sequence in bytes, and sequencePath is for one in JSON",
            )
        if self.framing == "plain":
            self.refuse(("on_malformed", "dead_letter_location"), "needs a framing: every message fits plain")
        numbering = self.numbering
        if self._preset.numbering is None and self.sequence_by:
            raise OptionError(
                f"sequenceBy={self.sequence_by} needs numbered messages: {self._why_unnumbered()}"
            )
        if numbering is None:
            self.refuse(self.of_role(Role.NUMBERED), f"needs numbered messages: {self._why_unnumbered()}")
            return
        self._check_numbering(numbering)
        self._check_replay(numbering)

    def _why_unnumbered(self) -> str:
        if self.sequence_by == () and self._preset.numbering is not None:
            return "sequenceBy=none tracks nothing"
        return f"{self._preset.unnumbered}; name the framing that your publisher uses"

    def _check_numbering(self, numbering: Numbering) -> None:
        if "publisher" in numbering.by and self._preset.nameless:
            raise OptionError(
                f"sequenceBy={','.join(numbering.by)}: framing={self.framing} names no publisher"
                f"{'; set publisherFrame' if self.framing == 'custom' else ''}, or count by endpoint or topic"
            )
        if self.deduplicate and self.bind and numbering.by == ("endpoint",):
            raise OptionError(
                "deduplicate with bind and sequenceBy=endpoint: publishers that connect to one endpoint would look "
                "like one, and their messages like duplicates; count by publisher or topic, or connect to each of them"
            )
        if "topic" in numbering.by and self.framing == "custom" and self.topic_frame is None:
            raise OptionError(f"sequenceBy={','.join(numbering.by)}: set topicFrame, or count by endpoint")
        low, high = self._range
        if not low <= numbering.start <= high:
            raise OptionError(f"sequenceStart={numbering.start} must be from {low} to {high}")
        if numbering.end is not None and not numbering.start < numbering.end <= high:
            raise OptionError(
                f"sequenceEnd={numbering.end} must be more than sequenceStart={numbering.start}, and {high} at most"
            )

    @property
    def _range(self) -> tuple[int, int]:
        """The lowest and the highest sequence that fits its field."""
        largest = 2**63 - 1  # the column is a BIGINT
        preset = self._preset.numbering
        if self.framing != "custom" or self.sequence_path is not None:
            return 0, largest if preset is None or preset.end is None else preset.end
        bits = 8 * self.sequence_width
        if self.sequence_signed:
            return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        return 0, min(2**bits - 1, largest)

    def _check_replay(self, numbering: Numbering) -> None:
        if not self.replay_endpoint:
            self.refuse(
                ("replay_from", "replay_timeout"),
                "needs replayEndpoint, where missing messages are requested",
            )
            return
        if self.framing != "vllm":
            raise OptionError(
                f"replayEndpoint={self.replay_endpoint} needs framing=vllm: the replay protocol carries a sequence and "
                f"a payload, from which a message of framing={self.framing} cannot be made"
            )
        if len(self.replay_endpoint) != len(self.connect) or self.bind:
            raise OptionError(
                f"replayEndpoint={self.replay_endpoint} must name one endpoint for each of connect={self.connect}, in "
                "the same order, and bind none: a missing message is asked of the publisher that sent it"
            )
        if numbering.end is not None:
            raise OptionError("sequenceEnd with replayEndpoint: vLLM's numbers never start again; remove one")
        if self.replay_timeout <= 0:
            raise OptionError("replayTimeout=0s gives no publisher time to answer; set 1s or more")
        if numbering.by != ("endpoint",):
            raise OptionError(
                f"sequenceBy={','.join(numbering.by)}: with replayEndpoint it is endpoint, one publisher for each; "
                "remove it"
            )
