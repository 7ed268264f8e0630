"""Sends a reading every millisecond to its receivers (PUSH)."""

import itertools
import time

import zmq

with zmq.Context() as context, context.socket(zmq.PUSH) as push:
    push.bind("tcp://*:5557")
    for number in itertools.count():
        push.send_json({"number": number, "sentAt": time.time()})
        time.sleep(0.001)
