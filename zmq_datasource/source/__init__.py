"""Fill a log from sockets, and give a query the log that it reads.

The way of a message: a ``Channel`` receives from one socket and watches its connections. A ``Receiver`` goes round all
channels, and makes rows with its ``Intake``, which finds the fields of messages and tracks their sequences. A
``LogReceiver`` appends these rows to the log. A ``FeedReceiver`` runs it: it waits for the log's lock (``standby``),
receives, and drains (``receive_loop``).

Modules beside that way: a channel asks its publisher for missing messages by the rules in ``replay_session``.
``incidents`` handles losses and messages that do not fit. ``facts`` has the figures of a receiver, and reads those that
a log stores. ``location`` finds the log of a feed, ``receives`` compares what processes receive into one log, and
``filling`` makes what fills it.

A query reads a ``QueryLog``: it follows the log, and may have a ``FeedReceiver``. ``chunk_server`` sends chunks to
executors that do not see the log's directory, in ranges of bytes, and ``remote_chunks`` is their end of its protocol.
"""
