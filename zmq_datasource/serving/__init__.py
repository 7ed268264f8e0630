"""Serves the log of a receiver to durable subscribers.

    receiver ─► log ─► reading ─► server ─► durable (ROUTER) ◄─ protocol ─► subscriber_session ◄─ subscriber

``server`` decides, and ``durable`` does: one thread, ``zmq-durable``, in the process of the receiver. ``subscriber``
is the client, for callers that wait and for asyncio, and ``subscriber_session`` its side of the conversation. Both
sides are state machines without sockets, clocks, files or threads, so that a search drives them together.
"""
