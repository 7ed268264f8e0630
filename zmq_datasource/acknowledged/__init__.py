"""Transactions over DEALER and ROUTER: every batch whole and once, whoever dies.

``protocol`` is the bytes; ``sender_session`` and ``uplink``, which carries it, are the sending end. At the receiving
end ``acceptor`` is the socket, ``reception`` what is done about each message, without one: ``sessions`` says who may
send how much, ``answers`` what is said, ``committer`` writes a transaction into the log, ``transactions`` knows which
are there, ``digests`` whether one is the same. ``producer`` is the client for programs without Spark.
"""
