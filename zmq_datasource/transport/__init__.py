"""A socket as a value: what it is to be, opened with every option set before, attached, flushed and closed.

Who comes in: the options of a role. Who goes out: an open socket, what is known of its peers, and how long its queues
take to empty. Nothing here knows what a message means.
"""
