"""Receives a feed into a log until it is killed; for tests of what survives that.

Usage: python -m tests.support.ingest_driver OPTION=VALUE ...

Prints the durable end of the log, a line each time it has moved.
"""

from __future__ import annotations

import sys
import time

from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.feed_receiver import FeedReceiver


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    ingest = FeedReceiver(parse(StreamReadOptions, options))
    ingest.start()
    told = -1
    deadline = time.monotonic() + 120  # if nobody kills it
    while time.monotonic() < deadline:
        end = ingest.seal() if ingest.receives else told
        if end != told:
            print(end, flush=True)
            told = end
        time.sleep(0.002)
    ingest.stop()


if __name__ == "__main__":
    main()
