"""Serves what a receiver receives: its log to durable subscribers, and each message at once to plain ones.

    receiver ─► log ─► reading ─► server ─► durable (ROUTER) ◄─ protocol ─► subscriber_session ◄─ subscriber

``server`` decides, and ``durable`` does, in threads of the receiver's process. ``subscriber`` is the client, for
callers that wait and for asyncio, and ``subscriber_session`` its side of the conversation. Both sides are state
machines without sockets, clocks, files or threads, so that a search drives them together.

``publishing`` is the side of plain subscribers: an XPUB to which the receiver's compiled core sends each message on
(``transport.core.Tee``). ``subscriptions`` says which topics publishers get to know. ``proxy`` starts a receiver with
these sides from Python.
"""
