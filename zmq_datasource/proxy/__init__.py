"""A proxy between publishers and subscribers that keeps the messages.

It has two processes, so that subscribers that read old messages do not slow new ones::

    publishers ─► front ─► backend ─► plain subscribers                                       live process
                    └────► journal
                              │ files
                              ▼
                            view ─► fetch_server ─► fetch_wire ─► durable subscribers         server process
                                         │
                                       names ─► positions ─► leases of the log

The live process (``process``, ``flow``) receives as a source does, publishes the messages as they came, and appends
them to the log, which it seals when a durable subscriber waits at its end (``sealing``). It sends the server process
the progress of the log: one small value, of which only the newest counts. The server process (``server``) reads the
chunks of the log. It ends with the live process (``child``). If the server process is killed, the live process starts
another one.

A durable subscriber asks for the rows from an id on (``fetch_protocol``), and between two requests the server keeps
only positions. ``subscriber`` is the client, and ``subscriber_session`` its state machine. ``handle`` starts a proxy
from Python.
"""
