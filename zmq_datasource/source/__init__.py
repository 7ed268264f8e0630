"""What fills a log from sockets.

A message's way: ``channel`` takes frames from one socket and watches its connections, ``receiver`` goes round all of
them, ``intake`` finds the fields and tracks the numbers, ``log_receiver`` appends the rows to the log, and
``receiving`` is the thread that has it do so. ``replayer`` asks for what is missing, as ``replay_session`` says,
``incidents`` and ``dead_letters`` keep what does not fit, ``kept`` reads what a log keeps of all this. A query reads
a ``feed``, which has one of two sources: ``ingest`` is the log that is filled here, ``follow`` one that another
process fills.
"""
