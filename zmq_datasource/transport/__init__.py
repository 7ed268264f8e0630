"""Opens sockets with every option set before bind and connect; watches, flushes and closes them.

``SocketSpec`` (``spec``) describes a socket, and ``OpenSocket`` (``opened``) opens it. ``core`` moves messages between
a socket and Arrow's buffers. ``link`` carries a ``session``, a state machine without a socket, over a DEALER;
``answers`` sends the answers of a ROUTER. This room does not interpret messages.
"""
