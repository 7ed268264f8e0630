"""Options about the frames and sequences of messages, and about messages that are malformed or missing.

A preset of ``framing`` says where topic, publisher, sequence and value are, and how its publishers count
(``presets``). With ``custom``, options say both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from zmq_datasource.errors import OptionError
from zmq_datasource.options.log import LogOptions
from zmq_datasource.options.parser import Role, doc
from zmq_datasource.options.presets import PRESETS, Layout, Numbering, Preset, SequenceAt
from zmq_datasource.options.socket import Endpoints
from zmq_datasource.options.types import CountedBy, Delimiter

# How a message's frames carry its fields, at the source: the presets, and ``custom``.
Framing: TypeAlias = Literal["plain", "sequenced", "vllm", "bitcoin", "custom"]

# The framings of other programs.
_FOREIGN = ", ".join(f"`{name}`" for name in PRESETS if name not in ("plain", "sequenced"))


def _plain(text: str, *roles: Role, **constraints: Any) -> Meta:
    return doc(text, Role.SOCKET, Role.UNACKNOWLEDGED, *roles, **constraints)


def _custom(text: str, **constraints: Any) -> Meta:
    return _plain(text, Role.CUSTOM, **constraints)


def _frame(text: str) -> Meta:
    return _custom(text, ge=-1_000_000, le=1_000_000)


def _numbered(text: str, **constraints: Any) -> Meta:
    return _plain(text, Role.NUMBERED, **constraints)


class FramingOptions(LogOptions, frozen=True, kw_only=True, rename="camel"):
    """The options of a source about frames, sequences and replays."""

    framing: Annotated[
        Framing,
        _plain(
            "Where the topic, publisher, sequence and value are in a message: `plain`, `sequenced` (this package's "
            f"sink), {_FOREIGN}, or `custom`, for which `sequenceAt`, `topicFrame` and others say it. See "
            "docs/sequences.md."
        ),
    ] = "plain"
    topic_delimiter: Annotated[
        Delimiter | None,
        _plain(
            "What separates the topic from the value in messages of a single frame: a space, `:`, or other bytes, as "
            "in `hex:00`. Such a message is read as if topic and value had come in two frames: the topic is the part "
            "before the first delimiter. A message of several frames, or without the delimiter, stays as it is."
        ),
    ] = None
    on_malformed: Annotated[
        Literal["keep", "skip", "fail"],
        _plain(
            "What happens to a message that does not fit the framing. It is always counted and logged. `keep` makes it "
            "a row in which `topic`, `value`, `publisher` and `sequence` are null, and `frames` has all frames "
            "(`includeFrames`). `skip` leaves it out. `fail` leaves it out, and stops the query."
        ),
    ] = "keep"
    topic_frame: Annotated[
        int | None,
        _frame(
            "`custom`: the number of the frame that is the topic. Numbers start at 0, and negative ones count "
            "from the end."
        ),
    ] = None
    publisher_frame: Annotated[
        int | None, _frame("`custom`: the number of the frame that names the publisher.")
    ] = None
    value_frame: Annotated[
        int | None,
        _frame(
            "`custom`: the number of the frame that is the value. If it is not set, it is the last frame."
        ),
    ] = None
    sequence_at: Annotated[
        SequenceAt | None,
        _custom(
            "`custom`: the place of the sequence. `1:3:u32le` is an integer in bytes: in frame 1 from byte 3, "
            "unsigned, of 32 bits, little-endian (`u` or `i`, `32` or `64`, `le` or `be`). `1:$.header.frame` is a "
            "number in the JSON text of frame 1."
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
            "The maximum number of counters. When there are more, the one that was not used for the longest time is "
            "forgotten. With `ROUTER`, the maximum number of producers whose last transaction is remembered. For "
            "another one, a producer without a name is forgotten, or one that was silent for seven days; otherwise the "
            "other one is refused.",
            Role.SOCKET,
            ge=1,
            le=10_000_000,
        ),
    ] = 10_000
    replay_endpoint: Annotated[
        Endpoints,
        _numbered(
            "The replay socket (ROUTER, vLLM's protocol) of each publisher in `connect`, in the same order. "
            "Missing messages are requested there, and when the feed is silent, also what follows the last "
            "one. A message that comes once more is left out, as with `deduplicate`."
        ),
    ] = Endpoints()
    replay_from: Annotated[
        Literal["latest", "earliest"],
        _numbered(
            "Where a query without a history starts: with what arrives from now on, or at the `earliest` message that "
            "the publisher still has (`replayEndpoint`). With `earliest` and `sequenceStart`, each counter's messages "
            "from there up to the first received one count as lost, also without `replayEndpoint`."
        ),
    ] = "latest"

    @property
    def layout(self) -> Layout | None:
        """Where the fields of a message are; None for plain framing."""
        return self._preset.layout

    @property
    def numbering(self) -> Numbering | None:
        """How messages are counted; None if nothing is tracked."""
        preset = self._preset.numbering
        if preset is None or self.sequence_by == ():
            return None
        return preset._replace(
            by=preset.by if self.sequence_by is None else self.sequence_by,
            start=preset.start if self.sequence_start is None else self.sequence_start,
            whole=preset.whole or (self.replay_from == "earliest" and self.sequence_start is not None),
        )

    @property
    def _preset(self) -> Preset:
        if self.framing == "custom":
            return self._custom
        if self.framing == "vllm" and self.replay_endpoint:
            # There is one publisher for each endpoint, and a replayed message does not always have its topic.
            return PRESETS["vllm"]._replace(numbering=Numbering(("endpoint",), replayed=True))
        return PRESETS[self.framing]

    @property
    def _custom(self) -> Preset:
        value = -1 if self.value_frame is None else self.value_frame
        at = self.sequence_at
        named = (self.topic_frame, self.publisher_frame, None if at is None else at.frame, value)
        layout = Layout(
            max(place + 1 if place >= 0 else -place for place in named if place is not None),
            self.topic_frame,
            self.publisher_frame,
            at,
            value,
            exact=False,
        )
        if at is None:
            return Preset(layout, unnumbered="sequenceAt is not set")
        return Preset(layout, Numbering(("endpoint" if self.publisher_frame is None else "publisher",)))

    def check(self) -> None:
        super().check()
        if self.framing != "custom":
            self.refuse(
                self.of_role(Role.CUSTOM), f"is for framing=custom; framing={self.framing} knows its layout"
            )
        if self.framing == "plain":
            self.refuse(("on_malformed",), "needs a framing: every message fits plain")
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
        layout = self.layout
        assert layout is not None and layout.sequence is not None, "numbered messages have a sequence"  # noqa: PT018
        for name, place in (("publisher", layout.publisher), ("topic", layout.topic)):
            if name in numbering.by and place is None:
                raise OptionError(
                    f"sequenceBy={','.join(numbering.by)}: framing={self.framing} has no {name} in its messages"
                    f"{f'; set {name}Frame' if self.framing == 'custom' else ''}, or count by endpoint or topic"
                )
        if self.deduplicate and self.bind and numbering.by == ("endpoint",):
            raise OptionError(
                "deduplicate with bind and sequenceBy=endpoint: publishers that connect to one endpoint would look "
                "like one, and their messages like duplicates; count by publisher or topic, or connect to each of them"
            )
        low, high = layout.sequence.range
        if not low <= numbering.start <= high:
            raise OptionError(f"sequenceStart={numbering.start} must be from {low} to {high}")

    def _check_replay(self, numbering: Numbering) -> None:
        if not self.replay_endpoint:
            if not numbering.whole:
                self.refuse(
                    ("replay_from",),
                    "needs replayEndpoint, where old messages are requested, or sequenceStart, from which those "
                    "before the first received one count as lost",
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
        if numbering.by != ("endpoint",):
            raise OptionError(
                f"sequenceBy={','.join(numbering.by)}: with replayEndpoint it is endpoint, one publisher for each; "
                "remove it"
            )
