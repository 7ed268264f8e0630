"""The write that a task belongs to, and the task's report to the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import ZmqDataSourceError


@dataclass(frozen=True)
class Job:
    """One write: a batch of a streaming query, or a batch write with a name of its own.

    Attributes:
        query, batch: The id of the query and the number of the batch; or the name of a batch write, and 0.
        streaming: Whether it is a batch of a streaming query.
        counted: The query and batch to whose account the write adds: in ``foreachBatch`` those of the query,
            and outside of a query its own.
        execution: Spark's id of the execution: the same for all writes of a batch, and another one when it is repeated.
        write: Spark's id of the write; in ``foreachBatch`` each write of a batch has another one.
        query_name: The name that the user has given the query.
    """

    query: str
    batch: int
    streaming: bool
    counted: tuple[str, int]
    execution: str = ""
    write: str = ""
    query_name: str | None = None

    @classmethod
    def of(cls, name: str | None, context: TaskContext | None) -> Job:
        """The job of a task.

        Args:
            name: The name of a batch write; None for a streaming query.

        Raises:
            ZmqDataSourceError: Spark does not tell the query or the batch. Under a wrong name or number the batch would
                be taken for one that is committed.
        """
        if context is None:
            return cls._named(name, None, None)
        application = context.getLocalProperty("spark.app.id") or ""
        execution, write = (
            f"{application}-{context.getLocalProperty(key) or ''}"
            for key in ("spark.sql.execution.root.id", "spark.sql.execution.id")
        )
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            return cls._named(name, query, batch, execution, write)
        # Spark's description of a batch begins with the query's name, if it has one.
        called = (context.getLocalProperty("spark.job.description") or "").partition("\nid = ")
        query_name = called[0] if called[1] and called[0] else None
        streaming = name is None
        counted = query, int(batch)
        own, number = counted if name is None else (name, 0)
        return cls(own, number, streaming, counted, execution, write, query_name)

    @classmethod
    def _named(cls, name: str | None, query: str | None, batch: str | None, *executions: str) -> Job:
        """The job of a batch write outside of a query; raises ZmqDataSourceError if it has no name."""
        if name is None:
            raise ZmqDataSourceError(
                f"writing a batch of a query: Spark's task has sql.streaming.queryId={query} and "
                f"streaming.sql.batchId={batch}, and both are needed to know the batch when it is repeated; write it "
                "with writeStream on classic Spark, or with df.write in foreachBatch"
            )
        return cls(name, 0, False, (name, 0), *executions)

    @property
    def of_query(self) -> bool:
        """Whether it is a batch of a streaming query, or a write in its ``foreachBatch``."""
        return self.streaming or self.counted[0] != self.query

    def publisher(self, partition: int) -> str:
        """The publisher name of a task's rows: the same for each attempt at the task, and when the batch of a stream is
        repeated."""
        return f"{self.query}/{self.batch}/{partition}" if self.streaming else f"{self.query}/{partition}"


@dataclass
class TaskReport(WriterCommitMessage):
    """The report of a task, which Spark passes to ``commit`` on the driver.

    Attributes:
        job: The write that the task belongs to.
        dead_letters: The files with the task's dead letters.
        attempt: The attempt under which the rows are staged at the receiver, if they are.
        digest: Of the rows, if they are part of a transaction.
    """

    job: Job
    counters: SinkCounters = field(default_factory=SinkCounters)
    dead_letters: Sequence[str] = ()
    attempt: str | None = None
    digest: int = 0
