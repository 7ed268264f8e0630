"""A proxy between publishers and subscribers that remembers what passes.

Two processes, so that who reads the past never slows the present::

    publishers ─► fronts ─► journal ─► backend ─► plain subscribers       live process (flow)
                              │ files
                              ▼
                             view ─► replays, durable subscribers         server process (server)

The live process receives, writes, and only then publishes (``flow`` drives ``fronts``, ``journal`` and
``backend``). It tells the server process how far the log has come, through a pipe that holds only
the newest; the server reads the files (``view``), also that of the open chunk. It tells back how far
its subscribers have come, and the live process deletes nothing that they still need while there is room.
Each of the two ends when the other does.
"""
