"""The kinds of a read, each with the options that it accepts: a stream, a batch, and a program that only receives."""

from __future__ import annotations

from zmq_datasource.errors import OptionError
from zmq_datasource.options.offsets import Place
from zmq_datasource.options.parser import Role
from zmq_datasource.options.read import ReadOptions
from zmq_datasource.options.receiving import share_of

__all__ = ["OF_A_QUERY", "BatchReadOptions", "ReceiveOptions", "StreamReadOptions"]


class StreamReadOptions(ReadOptions, frozen=True, kw_only=True, rename="camel"):
    """``spark.readStream.format("zmq")``."""

    @property
    def starting_place(self) -> Place:
        """Where a query without a checkpoint begins. If it only reads a log, it reads all of it by default."""
        return self.start or Place("latest" if self.has_endpoints else "earliest", None)

    def check(self) -> None:
        super().check()
        self.refuse(self.of_role(Role.BATCH), "belongs to a batch read, not to spark.readStream")
        if self.receivers == 1:
            self.refuse(("receivers_by",), "needs receivers, of which there is one")
        if self.reader is None:
            self.refuse(("reader_timeout",), "needs reader: it is for a query that has a name")
        if self.wal_store is not None:
            self.refuse(("serve_log",), "has no effect with walStore, which the executors read themselves")
        share_of(self, 0)
        if not self.has_endpoints and not self.has_log:
            raise OptionError(
                "neither connect nor bind is set; name the feed, as in .option('connect', 'tcp://feed:5556'), or with "
                "walLocation or walStore alone the log that zmq-datasource receive fills"
            )
        if not self.has_endpoints:
            self.refuse_socket(
                Role.WRITER,
                "is for the process that receives; this query only reads its log",
            )


# The roles of options about the rows that a query reads.
OF_A_QUERY = (Role.BATCH, Role.QUERY, Role.ROWS, Role.LIVE)


class ReceiveOptions(StreamReadOptions, frozen=True, kw_only=True, rename="camel"):
    """``zmq-datasource receive``, which fills a log and reads no rows."""

    def check(self) -> None:
        self.refuse(self.of_role(*OF_A_QUERY), "has no effect here: set it at the query that reads the log")
        super().check()


class BatchReadOptions(ReadOptions, frozen=True, kw_only=True, rename="camel"):
    """``spark.read.format("zmq")``: a read of a live socket, or with ``walLocation`` or ``walStore`` of a log."""

    def check(self) -> None:
        super().check()
        self.refuse(self.of_role(Role.STREAM), "belongs to a streaming read, not to spark.read")
        live = self.has_endpoints
        if live and self.has_log:
            raise OptionError(
                "a batch read takes either connect/bind (a live socket) or walLocation or walStore (a log); keep one"
            )
        if not live and not self.has_log:
            raise OptionError(
                "neither connect nor bind (a live socket) nor walLocation or walStore (a log) is set; name one"
            )
        if self.socket_type == "ROUTER":
            raise OptionError(
                "socketType=ROUTER needs a log to acknowledge into; receive with spark.readStream or zmq-datasource "
                "receive, and read that log with walLocation"
            )
        if live:
            self.refuse(
                self.of_role(Role.LOG),
                "needs walLocation: it is for a log, and a live socket has no history",
            )
        else:
            self.refuse_socket(
                Role.LIVE,
                "is for a live socket; a log is cut with endingOffsets, .where() or .limit()",
            )
        if self.view == "gaps":
            self.refuse(self.of_role(Role.ROWS), "is about messages; view=gaps shows the whole gap table")
        if self.ending_offsets and self.ending_offsets.word == "earliest":
            raise OptionError("endingOffsets=earliest reads nothing; use latest or an offset in JSON")
