"""Record what the publishers of KV events of vLLM, SGLang and Dynamo send, as ``tests/data/kv_events.json``.

    python tests/support/kv_events.py "vLLM 0.26.0" vllm/distributed/kv_events.py > vllm.json

The argument is a file of the program's wheel: ``vllm/distributed/kv_events.py``,
``sglang/srt/disaggregation/kv_events.py``, or ``dynamo/trtllm/publisher.py``. It runs as it is, but neither torch nor
the rest of its package is imported: stubs take the places of what it imports. Needs msgspec, pyzmq and pydantic.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import logging
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

TOPIC = "kv@pod@model"
# vLLM's and TensorRT-LLM's hashes have no sign, and SGLang's have one. Dynamo gives TensorRT-LLM's a sign.
LARGEST = 2**64 - 1
_TIMES = (10.0, 12.5, 70.0)
_TIMEOUT_MS = 5000


def _stub(name: str, **attributes: Any) -> None:
    """Make a module, and the packages around it, as far as they are not there."""
    for end in range(1, name.count(".") + 2):
        package = ".".join(name.split(".")[:end])
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = []
    vars(sys.modules[name]).update(attributes)


def _imported(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("kv_events", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def vllm(file: Path) -> Any:
    """vLLM's module."""
    network = dict.fromkeys(("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"))
    _stub("vllm.logger", init_logger=logging.getLogger)
    _stub("vllm.config.kv_events", KVEventsConfig=types.SimpleNamespace)
    _stub("vllm.utils.network_utils", **network)
    _stub("vllm.v1.core.kv_cache_utils", ExternalBlockHash=bytes | int)
    return _imported(file)


def sglang(file: Path) -> Any:
    """SGLang's module."""
    _stub("sglang.srt.runtime_context", get_parallel=None)
    _stub("sglang.srt.utils.network", NetworkAddress=None)
    return _imported(file)


def dynamo(file: Path) -> Any:
    """Dynamo's publisher of TensorRT-LLM's events: two definitions of a module that needs TensorRT-LLM."""
    module = types.ModuleType("publisher")
    wanted = {"ZmqKvEventPublisher", "_to_signed_i64"}
    body = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") in wanted]
    clock = types.SimpleNamespace(time=iter([10.0, 12.5, 12.5, 70.0, 70.0]).__next__)
    vars(module).update(logging=logging, time=clock, msgspec=msgspec, zmq=zmq)
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *body], []), str(file), "exec"), vars(module))
    return module


def batches(module: Any, largest: int) -> Iterator[Any]:
    """The batches that are recorded: two blocks are stored and removed again, one stays until all are cleared."""

    def stored(hashes: list[Any], parent: Any, tokens: list[int]) -> Any:
        names = set(module.BlockStored.__struct_fields__)
        given = {"lora_id": None, "lora_name": None, "medium": "GPU"}
        new = {"group_idx": 1, "kv_cache_spec_kind": "full_attention", "extra_keys": [("salt",), None]}
        return module.BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=tokens,
            block_size=16,
            **{name: value for name, value in (given | new).items() if name in names},
        )

    def removed(block: Any) -> Any:
        return module.BlockRemoved(block_hashes=[block], medium="GPU")

    yield from (
        module.KVEventBatch(ts=ts, events=events)
        for ts, events in zip(
            _TIMES,
            (
                [stored([1, largest], None, [7] * 32)],
                [removed(1), stored([3], 1, [8] * 16)],
                [removed(largest), module.AllBlocksCleared()],
            ),
            strict=True,
        )
    )


def publish(publisher: Any, module: Any, largest: int) -> int:
    """Publish all; returns how many messages that gives."""
    if not hasattr(publisher, "publish"):
        publisher.publish_stored([7] * 32, [16, 16], [1, largest])
        publisher.publish_removed([1])
        publisher.publish_stored([8] * 16, [16], [3], parent_hash=1)
        publisher.publish_removed([largest])
        publisher.publish_all_cleared()
        return 5
    for batch in batches(module, largest):
        publisher.publish(batch)
    return len(_TIMES)


@contextmanager
def socket_of(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, _TIMEOUT_MS)
        if kind == zmq.SUB:
            sock.setsockopt(zmq.SUBSCRIBE, b"")
        sock.connect(endpoint)
        yield sock


@dataclasses.dataclass(frozen=True)
class Program:
    """A program's publisher, and what it is recorded with."""

    module: Any
    publisher: Any
    largest: int
    replays: bool

    @classmethod
    def of(cls, name: str, file: Path, live: str, replay: str) -> Program:
        if name.startswith("Dynamo"):
            module = dynamo(file)
            return cls(module, module.ZmqKvEventPublisher(live, 16, TOPIC), LARGEST, False)
        ranked = {"endpoint": live, "replay_endpoint": replay, "topic": TOPIC}
        if name.startswith("SGLang"):
            module = sglang(file)
            return cls(module, module.ZmqEventPublisher(0, **ranked), -1, True)
        module = vllm(file)
        return cls(module, module.ZmqEventPublisher(0, **ranked), LARGEST, True)


def record(name: str, file: Path) -> dict[str, Any]:
    """The live messages, and the replies to a request for all of them."""
    with tempfile.TemporaryDirectory() as directory:
        live, replay = f"ipc://{directory}/live", f"ipc://{directory}/replay"
        program = Program.of(name, file, live, replay)
        replies: list[list[bytes]] = []
        with socket_of(zmq.SUB, live) as sub:
            time.sleep(1)  # a PUB does not say when it has a subscription
            count = publish(program.publisher, program.module, program.largest)
            messages = [sub.recv_multipart() for _ in range(count)]
        if program.replays:
            with socket_of(zmq.DEALER, replay) as dealer:
                dealer.send_multipart([b"", bytes(8)])
                while not replies or b"\xff" * 8 not in replies[-1]:
                    replies.append(dealer.recv_multipart())
        program.publisher.shutdown()
    return {
        "program": name,
        "live": [[frame.hex() for frame in frames] for frames in messages],
        "replay": [[frame.hex() for frame in frames] for frames in replies],
    }


if __name__ == "__main__":
    print(json.dumps(record(sys.argv[1], Path(sys.argv[2])), indent=1))
