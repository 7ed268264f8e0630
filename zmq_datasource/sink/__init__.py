"""Sends Arrow data to sockets, and accounts for every row.

A task of Spark has one ``sender``. It opens a ``sending_socket`` and sends rows through it. ``in_flight`` keeps the
rows that a lost connection may take along. ``dead_letters`` stores the rows that could not be sent.
"""
