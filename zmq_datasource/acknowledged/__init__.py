"""Transactions over DEALER and ROUTER: each batch gets into the log whole and once, even if either side dies.

``protocol`` has the messages. The sending side is ``sender_session``, a state machine, and ``uplink``, which carries it
over a socket; ``producer`` is the client for programs without Spark. At the receiving side, ``reception`` is the state
machine, with ``transactions``, which are committed, ``attempt_files`` and the log. ``acceptor`` is its socket.
"""
