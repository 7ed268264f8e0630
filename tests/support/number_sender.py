"""A PUSH that sends numbers until its input ends, and then says how many.

Usage: python -m tests.support.number_sender ENDPOINT
"""

from __future__ import annotations

import sys
import threading

import zmq


def main() -> None:
    ended = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        # What a connection holds when it is lost is lost.
        push.setsockopt(zmq.SNDHWM, 10)
        push.setsockopt(zmq.SNDBUF, 4096)
        push.setsockopt(zmq.LINGER, 5000)
        push.bind(sys.argv[1])
        sent = 0
        while not ended.wait(0.002):
            try:
                push.send(b"%d" % sent, zmq.NOBLOCK)
            except zmq.Again:
                push.getsockopt(zmq.EVENTS)
            else:
                sent += 1
    print(sent)


if __name__ == "__main__":
    main()
