"""What each section of ``RESULTS.md`` says of itself, in the order in which they come, and which ratios it shows."""

from __future__ import annotations

from benchmarks.framings import FRAMINGS, PLAIN
from benchmarks.kafka import KAFKA, OURS
from benchmarks.loss import BARE as BARE_RECEIVER
from benchmarks.loss import OURS as WITH_SPARK
from benchmarks.metrics import BARE, EMPTY_LISTENER, LISTENER, METERED
from benchmarks.proxy import CATCHING_UP, FORWARDING
from benchmarks.proxy import LOOP as LOG_LOOP
from benchmarks.proxy import OURS as PROXY
from benchmarks.proxy import PLAIN as PLAIN_PROXY
from benchmarks.proxy import UNSYNCED as UNSYNCED_PROXY
from benchmarks.receiving import OTHERS, RECEIVING, SEALING
from benchmarks.sink import BATCH, LOOP, NOTHING, STREAM
from benchmarks.source import BACKLOG, DURABLE, RAW, TUTORIAL, UNSYNCED
from benchmarks.tables import JSON, TABLES
from benchmarks.transactions import ACKNOWLEDGED, PARQUET
from benchmarks.transactions import PLAIN as PLAIN_MESSAGES

__all__ = ["RATIOS", "TITLES"]

_CHECKPOINTS = "Checkpoints are written as docs/tuning.md says for a local disk."

TITLES = {
    "source": (
        "Source throughput",
        "Messages a second of a running query, from the end of one micro-batch to the end of another "
        "(`noop` sink, PULL over tcp loopback, high-water marks of 1000, two cores for all processes). "
        f"The sender is a loop in C that never pauses. *{RAW}*: a `recv()` loop, no Spark. *{TUTORIAL}*: a "
        "`SimpleDataSourceStreamReader` that drains the socket at each trigger, for at most a second (0.1 s "
        f"above 100 B), a tuple a message, nothing durable. *{DURABLE}*: this package as it is by default, every chunk "
        f"forced to the disk. *{BACKLOG}*: no socket, a log filled beforehand is read: what the JVM and "
        f"its workers alone allow. {_CHECKPOINTS}",
    ),
    "framings": (
        "The cost of judging sequences",
        "Messages a second with 100 bytes of payload, as source throughput, log and all, for each "
        f"framing, with `deduplicate`. *{PLAIN}*: one frame, no numbers; *numbered*: one frame that begins "
        f"with its number; the others have three frames, *sequenced* four from eight publishers. {_CHECKPOINTS}",
    ),
    "receiving": (
        "What receiving costs",
        f"Microseconds of CPU a message, by thread, of a receiver without Spark. *{RECEIVING}*: from the "
        f"socket to Arrow; *{SEALING}*: from Arrow to the disk; *{OTHERS}*: the rest of the process.",
    ),
    "sink": (
        "Sink throughput",
        "Messages a second, each a topic and a value, into a loop in C. One Spark partition, a socket "
        f"that waits when its peer is full (PUB with NODROP). *{LOOP}* sends the same without Spark. "
        f"*{NOTHING}*: a sink in Python that takes Arrow batches and does nothing, so what Spark itself "
        f"allows. *{BATCH}*: one write, from the call until the last is received; *{STREAM}*: a query of "
        "micro-batches of 100 MB and more, from the end of one to the end of another.",
    ),
    "tables": (
        "Tables as messages",
        "Rows of three numeric columns a second from one Spark job (`df.write`, two partitions) to another one (a "
        "query into the `noop` sink) by PUSH and PULL, from the call of the one until the other has read them all, "
        f"both on the same two cores, each chunk forced to the disk. *{JSON}*: `to_json` and `from_json`; "
        f"*{TABLES}*: a message for 10,000 rows.",
    ),
    "transactions": (
        "Transactions",
        "Rows of 100 bytes a second, from `df.write` of a cached DataFrame in two partitions until all "
        f"are on disk. *{ACKNOWLEDGED}*: one transaction, staged, committed and acknowledged, into the log "
        f"of a receiver process; *{PLAIN_MESSAGES}*: plain messages into the same kind of log; "
        f"*{PARQUET}*: `df.write.parquet`, in the same JVM (most of whose bytes its encoding saves).",
    ),
    "latency": (
        "Latency",
        "Milliseconds from the sender's `zmq_send` until the user's function (`foreachBatch`) has the row, messages of "
        f"100 bytes at a fixed rate, PULL, each chunk forced to the disk, no trigger interval. {_CHECKPOINTS}",
    ),
    "backlog": (
        "Reading a backlog",
        "Messages of 100 bytes a second that a query reads from a log of so many, in eight micro-batches, all but the "
        "first of them.",
    ),
    "scaling": (
        "More receivers, partitions and readers",
        "Messages a second of 100 bytes from one sender in C into the log of one program (`zmq-datasource receive`, "
        "PULL, nothing forced to the disk), by its number of receivers, on two cores for both. Then megabytes a second "
        "of `value` that one task reads of a log: its files, which the system has in memory, or the same from the "
        "driver's process, encrypted, over loopback. Then the median time "
        "of planning a batch of a query that follows a log with many partitions, in none of which anything is new; "
        "and of the look at what many readers still need, before chunks are deleted.",
    ),
    "growth": (
        "Many topics, many publishers",
        "Microseconds a message of 100 bytes costs the receiving thread, from libzmq's queue to rows, by how many "
        "topics (`framing=bitcoin`) or publishers (`framing=sequenced`) come in turn, each with numbers of its own.",
    ),
    "loss": (
        "Loss at default high-water marks",
        "Messages of 100 bytes that a PUB in C, 100,000 a second, high-water marks of 1000 on both sides, "
        "drops because its subscriber is too slow, while Spark computes on both cores. A publisher that "
        f"was itself held up does not catch up in a burst. *{BARE_RECEIVER}*: a loop that does nothing "
        f"else; *{WITH_SPARK}*: a running query.",
    ),
    "metrics": (
        "The cost of metrics",
        f"Messages a second of 100 bytes, as source throughput and as sink throughput (*{STREAM}*, PUSH). "
        f"*{BARE}*: nothing is shown, no accumulator, no files. *{METERED}*: a report at each trigger, "
        f"files at `metricsLocation`, an accumulator. *{LISTENER}*: a callback and Prometheus too, beside "
        f"*{EMPTY_LISTENER}*, because PySpark itself works some 20 ms for each event of a listener in "
        "Python. Target: at least 0.97.",
    ),
    "proxy": (
        "The proxy",
        "From a publisher (XPUB) over a proxy to a subscriber, both in C, each a process of its own, tcp "
        "loopback, high-water marks of 10,000, nobody drops: messages of topic and value a second, as fast as it "
        f"goes, and how long one takes at a thousand a second. *{FORWARDING}*: libzmq's own, XSUB to XPUB, "
        f"which writes nothing. *{UNSYNCED_PROXY}*: ours, to the system's cache before it is published, "
        f"with its id; *{PROXY}*: forced to the disk before; *{PLAIN_PROXY}*: not forced, and "
        "without ids, so that the same frames go out. A log of 256 MiB. *Catching up*: a backlog that a proxy has "
        f"written, as one loop in Python gets it; *{CATCHING_UP}*: a `DurableSubscriber`; *{LOG_LOOP}*: the sealed "
        "chunks are read by the same process, without a proxy.",
    ),
    "memory": (
        "Memory",
        "Resident memory of Spark's source runner, the Python process that receives, while a backlog of 2 "
        "GB times the scale builds up that Spark does not read. Target: below 500 MB.",
    ),
    "planning": (
        "Planning",
        "Time of one call on the driver, for a micro-batch of the five newest chunks, by the length of "
        "the log. Target: about the same.",
    ),
    "kafka": (
        "Against Kafka",
        "Messages of 100 bytes through the same Spark, into the `noop` sink, on the same two cores, which "
        f"the broker shares. *{KAFKA}*: a broker of one node, two partitions, acknowledged by it, which "
        f"leaves the disk to the system; fed by Kafka's own `ProducerPerformance`. *{OURS}*: by default, "
        "each chunk forced to the disk; fed by a loop in C. *live*: as source throughput; *backlog*: what "
        "was stored beforehand; *latency*: from sending to the user's function (`foreachBatch`), at a "
        "thousand a second; *sink*: one `df.write` in two partitions until all are acknowledged (ours: a "
        "DEALER's transaction into another process's log); *tables*: rows of three numeric columns from one Spark "
        f"job to another, by Kafka as JSON or as Avro, by *{OURS}* with `valueFormat=arrow`.",
    ),
}
RATIOS = {
    "source": (
        (DURABLE, TUTORIAL),
        (DURABLE, BACKLOG),
        (DURABLE, RAW),
        (UNSYNCED, RAW),
    ),
    "framings": tuple((framed, PLAIN) for framed in FRAMINGS if framed != PLAIN),
    "sink": ((BATCH, LOOP), (BATCH, NOTHING), (STREAM, LOOP)),
    "tables": ((TABLES, JSON),),
    "metrics": ((METERED, BARE), (LISTENER, EMPTY_LISTENER)),
    "proxy": (
        (UNSYNCED_PROXY, FORWARDING),
        (PROXY, FORWARDING),
        (PLAIN_PROXY, FORWARDING),
        (CATCHING_UP, LOG_LOOP),
    ),
    "transactions": ((ACKNOWLEDGED, PLAIN_MESSAGES), (ACKNOWLEDGED, PARQUET)),
    "kafka": ((OURS, KAFKA), (OURS, f"{KAFKA}, JSON"), (OURS, f"{KAFKA}, Avro")),
}
