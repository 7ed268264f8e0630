"""Arrow to sockets: rows come in, messages go out, and each is accounted for.

``sender`` sends, ``in_flight`` knows what may still be lost with a connection, ``dead_letters`` keeps what cannot be
sent.
"""
