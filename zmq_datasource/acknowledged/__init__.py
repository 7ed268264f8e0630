"""Transactions over DEALER and ROUTER: each batch gets into the log whole and once, even if either side dies.

``protocol`` has the messages. The sending side is ``sender_session``, a state machine, and ``uplink``, which carries it
over a socket; ``producer`` is the client for programs without Spark. At the receiving side, ``acceptor`` is the socket
and ``reception`` processes its messages: ``attempts`` receives rows and stages them, ``sessions`` has the attempts
that are being received, and the answers; ``transactions`` has what is committed, and writes staged attempts into the
log.
"""
