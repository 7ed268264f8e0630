"""Does the acts that the state machine ``reception`` asks for, with the files of attempts and the log.

What takes long is done in other threads: files are forced to the disk and checked by a pool. The rows of a commit are
read by the log, one data message at a time, while it writes their chunk. Transactions that are committed in the same
moment share a chunk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from zmq_datasource.acknowledged.attempt_files import AttemptFiles
from zmq_datasource.acknowledged.protocol import Committed, rows_of
from zmq_datasource.acknowledged.reception import (
    Act,
    Answer,
    Append,
    Asked,
    Check,
    Finish,
    Reception,
    Remove,
    Write,
)
from zmq_datasource.errors import LogError
from zmq_datasource.host import failpoints
from zmq_datasource.log import LogWriter, StoredRows


class Acts:
    """Does the acts; for the receiving thread.

    Args:
        reception: The state machine.
        files: Where attempts are staged.
        log: Where transactions are committed.
        pool: Threads for what takes long.
        clock: Seconds since the epoch, for the column ``timestamp``.

    Attributes:
        answers: The answers to send, oldest first. The caller takes them out.
    """

    def __init__(
        self,
        reception: Reception,
        files: AttemptFiles,
        log: LogWriter,
        pool: Executor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reception, self._files, self._log = reception, files, log
        self._pool, self._clock = pool, clock
        self._running: list[tuple[Finish | Check, Future[Any]]] = []
        self._appended: list[Asked] = []
        self._written: deque[tuple[list[Asked], Future[int]]] = deque()
        self.answers: deque[Answer] = deque()

    def recover(self, now: float) -> None:
        """Find the attempts of the writer before.

        Raises:
            LogError: A file cannot be read or deleted.
        """
        for name, stored in self._files.recover():
            self._reception.recover(name, stored, now)
        self.do(now)

    @property
    def busy(self) -> bool:
        """Whether an answer waits for another thread."""
        return bool(self._running or self._written)

    def do(self, now: float) -> None:
        """Do what is asked for, and tell the state machine what other threads have done. Call it often.

        Transactions that are appended in one call share a chunk.

        Raises:
            LogError: The log has failed.
        """
        reception = self._reception
        reception.log_is_full = self._log.full
        for running in [it for it in self._running if it[1].done()]:
            self._running.remove(running)
            self._try(running[0], partial(self._tell, *running, now), now)
        while self._written and self._written[0][1].done():
            commits, written = self._written.popleft()
            written.result()
            for asked in commits:
                failpoints.reach("acknowledged.committed.before_answer")
                reception.durable(asked)
        while reception.acts:
            act = reception.acts.popleft()
            if isinstance(act, Answer):
                self.answers.append(act)
                if isinstance(act.message, Committed):
                    failpoints.reach("acknowledged.committed.after_answer")
            else:
                self._try(act, partial(self._begin, act), now)
        if self._appended:
            failpoints.reach("acknowledged.commit.after_append")
            self._written.append((self._appended, self._log.cut()))
            self._appended = []

    def _try(self, act: Act, do: Callable[[], None], now: float) -> None:
        try:
            do()
        except Exception as e:
            if isinstance(act, Append) and isinstance(e, LogError):
                raise
            self._reception.failed(act, e, now)

    def _begin(self, act: Act) -> None:
        files = self._files
        match act:
            case Write(attempt, data, buffers):
                rows = rows_of(data, buffers, int(self._clock() * 1_000_000))
                stored = files.append(attempt.name, attempt.stored, rows)
                failpoints.reach("acknowledged.data.after_append")
                self._reception.written(attempt, stored)
            case Finish(attempt):
                self._running.append((act, self._pool.submit(files.finish, attempt.name, attempt.stored)))
            case Check(asked):
                self._running.append((act, self._pool.submit(_exhaust, files.read(asked.names))))
            case Append(asked):
                failpoints.reach("acknowledged.commit.before_append")
                latest = max(part.stored.latest for part in asked.parts)
                self._log.append_stored(
                    StoredRows(asked.transaction.rows, latest, partial(files.read, asked.names))
                )
                self._reception.appended(asked)
                self._appended.append(asked)
            case Remove(name):
                files.remove(name)

    def _tell(self, act: Finish | Check, done: Future[Any], now: float) -> None:
        if isinstance(act, Finish):
            stored = done.result()
            failpoints.reach("acknowledged.staged.before_answer")
            self._reception.finished(act.attempt, stored, now)
        else:
            done.result()
            self._reception.checked(act.asked)


def _exhaust(rows: Iterable[object]) -> None:
    for _ in rows:
        pass
