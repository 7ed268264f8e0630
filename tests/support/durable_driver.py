"""A durable subscriber as a process: it writes down what it got and what is acknowledged, until it is killed.

Usage: python -m tests.support.durable_driver ENDPOINT NAME FILE LAST
"""

from __future__ import annotations

import sys

from zmq_datasource import DurableSubscriber

_ACK_EVERY = 50


def main() -> None:
    endpoint, name, path, last = sys.argv[1:]
    with (
        open(path, "a", buffering=1) as file,
        DurableSubscriber(endpoint, name, auto_ack=False) as subscriber,
    ):
        for count, message in enumerate(subscriber, 1):
            assert message.value == b"%d" % message.id
            file.write(f"got {message.id}\n")
            if count % _ACK_EVERY == 0 or message.id == int(last):
                subscriber.ack(message, wait=True)
                file.write(f"acked {message.id}\n")
            if message.id == int(last):
                return


if __name__ == "__main__":
    main()
