"""Two writers: the one that puts a chunk's key first has given out its ids, however the lock was lost."""

from __future__ import annotations

import pytest

from tests.log.machines import Machines
from tests.support import batch_of, wait_for
from zmq_datasource.errors import LogLockedError


def test_an_idle_writer_notices_that_another_has_the_lock(anywhere: Machines) -> None:
    first = anywhere.writer()
    anywhere.lose_lock()
    anywhere.writer()
    assert isinstance(wait_for(lambda: first.failure, "the failure"), LogLockedError)
    with pytest.raises(LogLockedError):
        first.append(batch_of([b"0"]))
