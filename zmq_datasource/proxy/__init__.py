"""A proxy between publishers and subscribers that remembers what passes.

Two processes, so that who reads the past never slows the present::

    publishers ─► fronts ─► journal ─► backend ─► plain subscribers       live process (flow)
                              │ files
                              ▼
                             view ─► replays, durable subscribers         server process (server)

The live process (``process``) receives, writes, and only then publishes: ``flow`` drives ``fronts``, ``journal``
and ``backend``. Before it publishes it tells the server process how far the log has come, in a line of which
only the newest counts; the server reads the files (``view``), also that of the open chunk. It tells back
how far its subscribers have come, and the live process deletes nothing that they still need while there is room.
The server ends with the live process, which starts another one if it is killed.

``handle`` is the proxy from Python: it starts the live process, which ends with whoever started it.
``subscriber`` is the client of durable subscribers; ``subscriber_session`` is its side of their conversation.
"""
