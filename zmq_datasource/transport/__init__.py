"""A socket as a value: what it is to be, opened with every option set before, attached, flushed and closed.

Who comes in: the options of a role. Who goes out: an open socket, what is known of its peers, and how long its queues
take to empty. ``link`` carries a session, which is a conversation over DEALER without a socket; ``answers`` sends
what a ROUTER answers, without waiting for a client. Nothing here knows what a message means.
"""
