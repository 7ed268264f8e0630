"""What the real publishers of KV events send: recorded from their own modules, which ran with stubs around them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import DATA
from zmq_datasource.messages.framing.replay import read_reply

PROGRAMS = json.loads((DATA / "kv_events.json").read_text(encoding="utf-8"))


def messages(recorded: dict[str, Any], kind: str) -> list[list[bytes]]:
    return [[bytes.fromhex(frame) for frame in frames] for frames in recorded[kind]]


@pytest.mark.parametrize(
    ("program", "with_topic"),
    [("vLLM 0.10.2", False), ("vLLM 0.26.0", True), ("vLLM 0.33.0", True), ("SGLang 0.5.23", True)],
)
def test_a_replay_repeats_the_published_messages(program: str, with_topic: bool) -> None:
    (recorded,) = (one for one in PROGRAMS if one["program"] == program)
    *replies, end = [read_reply(frames) for frames in messages(recorded, "replay")]
    live = messages(recorded, "live")
    assert [reply.value for reply in replies] == [value for _, _, value in live]
    assert [reply.sequence for reply in replies] == list(range(len(live)))
    assert {reply.topic for reply in replies} == {live[0][0] if with_topic else None}
    assert end is None
