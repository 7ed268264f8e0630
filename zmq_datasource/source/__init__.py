"""What fills a log from sockets.

A message's way: ``receiver`` takes frames in rounds, ``intake`` finds their fields and judges their numbers,
``ingest`` appends the rows to the log, in a thread of its own. ``replayer`` asks for what is missing, as
``replay_session`` says, ``incidents`` and ``dead_letters`` keep what does not fit. ``follow`` is the log that another
process fills.
"""
