"""A COMMIT that the network holds arrives during a later transaction, and changes nothing there."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.acknowledged.test_acknowledged import receiving, values
from tests.support import free_endpoint
from tests.support.middlebox import Middlebox
from zmq_datasource import Producer

_COMMIT = re.compile(rb"\x01\x05ZDS.M", re.DOTALL)
# On a connection that lives on, the sender asks again after 2 s: then two of them arrive.
_HELD_SECONDS = {False: 2.3, True: 0.5}


@pytest.mark.parametrize("loses", [False, True], ids=["repeated", "of a lost connection"])
def test_a_late_commit_changes_nothing_in_the_next_transaction(
    loses: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, count = free_endpoint(), 0
    options = {"zmq.reconnect_ivl": "20"}
    with receiving(tmp_path, endpoint), Middlebox(endpoint) as box:
        with Producer(box.endpoint, "late", **options) as producer:
            began = time.monotonic()
            while count < 3 or time.monotonic() - began < _HELD_SECONDS[loses] + 0.5:
                if count == 1:
                    box.hold_back(_COMMIT, _HELD_SECONDS[loses], loses=loses)
                producer.send(f"{count}")
                producer.send(f"{count} too")
                producer.flush()
                count += 1
        assert box.held_back == [int(not loses), int(loses)]
    # An older number is refused, and the refusal reaches no transaction of the sender.
    assert ("refused a message of the transaction protocol: transaction 1 of late" in caplog.text) is loses
    assert values(tmp_path) == [value for n in range(count) for value in (f"{n}", f"{n} too")]
