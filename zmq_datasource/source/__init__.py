"""Fill a log from sockets, and give a query the log that it reads.

The way of a message: a ``Channel`` receives from one socket and watches its connections. A ``Receiver`` goes round all
channels, and makes rows with its ``Intake``, which finds the fields of messages and tracks their sequences. A
``LogReceiver`` appends these rows to the log. A ``ReceivingThread`` runs the ``LogReceiver``.

Modules beside that way: a channel asks its publisher for missing messages by the rules in ``replay_session``.
``incidents`` handles losses and messages that do not fit. ``facts`` has the figures of a receiver, and reads those that
a log stores. ``location`` finds the log of a feed. ``receiving`` has the thread, and records what a stop has lost.

A query reads a ``Feed``. This process fills the log (``ingest``), or another one does (``follow``). ``chunk_server``
sends chunks to executors that do not see the log's directory, in ranges of bytes, and ``remote_chunks`` is their end of
its protocol.
"""
