"""Counts what comes (PULL): how many readings, how many different ones, and how many in between are missing."""

import time

import zmq

seen: set[int] = set()
received, due = 0, time.monotonic()
with zmq.Context() as context, context.socket(zmq.PULL) as pull:
    pull.bind("tcp://*:5558")
    while True:
        if pull.poll(1000):
            seen.add(pull.recv_json()["number"])
            received += 1
        if time.monotonic() >= due and seen:
            missing = max(seen) - min(seen) + 1 - len(seen)
            print(f"received={received} different={len(seen)} missing={missing}", flush=True)
            due = time.monotonic() + 1
