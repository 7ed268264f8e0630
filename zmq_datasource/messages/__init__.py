"""What a message is: the schemas of raw messages, rows and the log, and framing, frames to fields and back.

``rows`` is the one builder of rows. Pure: bytes, columns and times come in, values go out.
"""
