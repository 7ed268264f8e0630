"""The data model: schemas of raw messages, rows and the log, and framing, which finds fields in frames.

Everything here is pure: it works on bytes, columns and times, and does no I/O.

Modules: ``columns`` declares the columns, and has functions on them that all others use; ``raw`` has messages as they
were received, and ``rows`` builds rows of them; ``framing`` finds the fields between these two. ``packed`` turns
columns into buffers for a socket, and back. ``arrow_values`` reads and writes values that are tables.
"""
