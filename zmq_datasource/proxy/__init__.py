"""A proxy between publishers and subscribers that keeps the messages.

It has two processes, so that subscribers of old messages do not slow new ones::

    publishers ─► channels ─► journal ─► backend ─► plain subscribers                      live process (flow)
                                 │ files
                                 ▼
                               view ─► fetch_server ─► fetch_wire ─► durable subscribers   server process (server)
                                            │      └─► replays ─► clients of vLLM's replay protocol
                                          names ─► positions ─► records of the log's readers

The live process (``process``) receives as a source does (``source.channel``), writes, and only then publishes the rows
that it has written: ``flow`` drives the channels, ``journal`` and ``backend``. Before it publishes, it tells the server
process how far the log has come, in a line of which only the newest counts. The server process reads the files
(``view``), also that of the open chunk, and tells the live process the first id that a reader of the log still needs.
The server process ends with the live process, which starts another one if it is killed.

A durable subscriber asks for what follows an id (``fetch_protocol``), and the server keeps nothing between two requests
but positions. The same server answers vLLM's replay protocol, which ``replays`` translates. ``subscriber`` is the
client of durable subscribers, and ``subscriber_session`` its state machine. ``handle`` starts a proxy from Python; the
live process ends with the process that started it.
"""
