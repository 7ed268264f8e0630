"""Sends Arrow data to sockets, and accounts for every row.

A task of Spark has one ``sender``. It opens a ``sending_socket`` and sends rows through it.
``in_flight`` keeps the rows that a lost connection may take along. ``unsent`` counts the rows that were not sent, and
stores them as dead letters.
"""
