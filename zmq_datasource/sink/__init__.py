"""Arrow to sockets: rows come in, messages go out, and each is accounted for.

``sender`` is one task's way out. It opens a ``sending_socket``, through which ``delivery`` sends; ``recovery`` knows
by ``in_flight`` what may still be lost with a connection; ``unsent`` counts what was not sent, and ``dead_letters``
keeps it.
"""
