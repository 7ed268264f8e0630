"""Being the one writer of a log partition in object storage, among machines that see nothing of each other but it.

A writer says every few seconds that it is alive, by an object that it writes anew. Another one claims the partition
only when that object has not changed for a while, as seen from here: no clocks are compared. This keeps two from taking
the partition from each other all the time. That no id is read twice if they do, the claims see to (``claims``).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from zmq_datasource.errors import DiskFaultError, LogLockedError, LogWriteError
from zmq_datasource.host import failpoints
from zmq_datasource.host.object_store import ObjectStore
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.claims import NO_CLAIM, Succession, new_claim
from zmq_datasource.log.files import MOUNT_AGAIN, WriterLock, this_process

__all__ = ["SILENT_SECONDS", "Tenure", "Tenures", "tenures_of"]

_log = logging.getLogger(__name__)

_BEAT_SECONDS = 3.0
# After so long without a sign of life another machine may become the writer. Shorter than ``LOCK_WAIT_SECONDS``.
SILENT_SECONDS = 12.0
_LOOKING_SECONDS = 1.0
# Silence counts only while it is listened to.
_BLIND_SECONDS = 4.0
_JOIN_SECONDS = 5.0


class _Seen(NamedTuple):
    claim: str
    modified: float
    since: float  # monotonic


_known: dict[tuple[str, int], Tenures] = {}
_knowing = threading.Lock()


def tenures_of(store: ObjectStore, partition: int) -> Tenures:
    """The claims of a partition, the same object for all in this process: that a writer is silent shows over time."""
    with _knowing:
        key = store.location.plain, partition
        if key not in _known:
            _known[key] = Tenures(store, partition)
        return _known[key]


class Tenures:
    """The claims of one log partition; see ``tenures_of``.

    Args:
        store: Where the log is.
        partition: Which of its partitions.
    """

    def __init__(self, store: ObjectStore, partition: int) -> None:
        self._store = store
        self._partition = partition
        self._prefix = f"{partition}/"
        self._looking = threading.Lock()  # of two looks at once the older one could be the last to be kept
        self._seen: _Seen | None = None
        self._next_look = self._looked_at = 0.0
        self._highest = NO_CLAIM
        self._alive = True
        self._about: dict[str, dict[str, str]] = {}

    def __str__(self) -> str:
        return f"{self._store}/{self._prefix}"

    def __reduce__(self) -> tuple[Callable[[ObjectStore, int], Tenures], tuple[ObjectStore, int]]:
        return tenures_of, (self._store, self._partition)  # a reader of Spark's takes its storage along

    def succession(self) -> Succession:
        """Who has written the partition, as of now."""
        return Succession(found.key for found in self._store.objects(f"{self._prefix}claims"))

    def is_held(self) -> bool:
        """Whether a writer is alive, as far as can be told from here by now."""
        return self._look()[1]

    def gone(self, wait: float) -> str | None:
        """The highest claim, if its maker is gone, or is within so many seconds; else None."""
        deadline = time.monotonic() + wait
        while True:
            claim, alive = self._look()
            if not alive:
                return claim
            if time.monotonic() >= deadline:
                return None
            check_signals()
            time.sleep(_LOOKING_SECONDS / 4)

    def _look(self, anew: bool = False) -> tuple[str, bool]:
        """The highest claim, and whether its maker is alive."""
        with self._looking:
            now = time.monotonic()
            if anew or now >= self._next_look:
                if self._seen is not None and now - self._looked_at > _BLIND_SECONDS:
                    self._seen = self._seen._replace(since=now)  # nobody was seen meanwhile, alive or not
                claim = self._highest = self.succession().highest
                found = None if claim == NO_CLAIM else self._store.find(self._alive_key(claim))
                if found is None:
                    self._seen, self._alive = None, False
                else:
                    if self._seen is None or self._seen[:2] != (claim, found.modified):
                        self._seen = _Seen(claim, found.modified, now)
                    self._alive = now - self._seen.since < SILENT_SECONDS
                self._looked_at = time.monotonic()
                self._next_look = self._looked_at + _LOOKING_SECONDS
            return self._highest, self._alive

    def highest(self, anew: bool = False) -> str:
        """The highest claim, as of a moment ago, or ``anew`` as of now."""
        return self._look(anew)[0]

    def about(self, claim: str) -> dict[str, str]:
        """What the maker of a claim has said of itself; nothing if there is no such claim."""
        if claim not in self._about:
            with suppress(FileNotFoundError, ValueError):
                content = json.loads(self._store.get(f"{self._prefix}claims/{claim}.json"))
                if isinstance(content, dict):
                    self._about = {claim: {key: str(value) for key, value in content.items()}}
        return self._about.get(claim, {})

    def holder(self, claim: str) -> str:
        """Who has made a claim, in words."""
        return self.about(claim).get("holder", "a process that did not say who it is")

    def begin(self, lock: WriterLock, feed: str, after: str, remember: Callable[[str], None]) -> Tenure:
        """Claim the partition.

        Args:
            lock: Of this machine's part of the log.
            feed: What is received, for others.
            after: The highest claim, whose maker is gone.
            remember: Told the claim before anybody else can see it, to know it again after a crash.

        Raises:
            LogLockedError: Another machine has claimed it at this moment.
        """
        if (highest := self.succession().highest) != after:
            raise LogLockedError(
                f"claiming the log in {self}: another machine has claimed it at this moment ({highest})"
            )
        claim = new_claim(highest)
        tenure = Tenure(self, lock, claim)
        remember(claim)
        # First the sign of life, so that nobody sees the claim without it.
        self.beat(claim)
        failpoints.reach("log.claim.before_put")
        self._store.put(
            f"{self._prefix}claims/{claim}.json",
            json.dumps({"holder": this_process(), "feed": feed}).encode(),
        )
        failpoints.reach("log.claim.after_put")
        self._next_look = 0.0
        try:
            tenure.check()
        except BaseException:
            tenure.release(locally=False)
            raise
        tenure.start()
        return tenure

    def beat(self, claim: str) -> None:
        """Say that the writer with this claim is alive."""
        self._store.put(self._alive_key(claim), b"alive")

    def forget(self, claim: str) -> None:
        """Say that it is not."""
        self._store.delete(self._alive_key(claim))
        self._next_look = 0.0

    def _alive_key(self, claim: str) -> str:
        return f"{self._prefix}alive/{claim}"


class Tenure(WriterLock):
    """Held by the one writer of the partition.

    Attributes:
        claim: Its name.
    """

    def __init__(self, tenures: Tenures, lock: WriterLock, claim: str) -> None:
        self._tenures = tenures
        self._lock = lock
        self.claim = claim
        self._lost: str | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="zmq-log-alive", daemon=True)

    @property
    def lost(self) -> str | None:
        return self._lost

    def start(self) -> None:
        """Go on saying that the writer is alive."""
        self._thread.start()

    def check(self) -> None:
        """Make sure that no other machine writes the partition, and that the storage still has the claim.

        Raises:
            LogLockedError: Another machine has taken it since.
            DiskFaultError: The storage has lost the claim, or does not answer.
        """
        self._lock.check()
        highest = self._tenures.succession().highest
        if highest < self.claim:
            raise DiskFaultError(
                f"writing to the log in {self._tenures}: the claim of this process is not there any more. {MOUNT_AGAIN}"
            )
        if highest > self.claim:
            raise LogLockedError(
                f"writing to the log in {self._tenures}: this process has lost it to {self._tenures.holder(highest)}. "
                "What it has received and not put there is lost; start it again, and it follows or takes over"
            )

    def release(self, *, locally: bool = True) -> None:
        """Let others write the partition.

        Args:
            locally: Whether the lock of this machine's part, too.
        """
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        failpoints.reach("log.tenure.before_forget")
        try:
            self._tenures.forget(self.claim)
        except LogWriteError as e:
            _log.warning("%s; another machine can write the log in %.0f s", e, SILENT_SECONDS)
        if locally:
            self._lock.release()

    def _beat(self) -> None:
        while not self._ending.wait(_BEAT_SECONDS):
            failpoints.reach("log.tenure.before_beat")
            try:
                self.check()  # first: nothing is put into a storage that is another one by now
                self._tenures.beat(self.claim)
            except LogLockedError as e:
                self._lost = str(e)
            except Exception as e:  # it is tried again; who writes a chunk hears of it
                _log.debug("saying that this process writes %s: %s", self._tenures, e)
