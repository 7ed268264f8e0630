"""What sources and sinks report, and its outlets.

``source`` puts a source's figures together. ``accounts`` adds up what a sink has written, batch by batch. ``store``
keeps both at ``metricsLocation``, and ``prometheus`` serves them. ``view`` shows them in tables and lines, those of a
``proxy`` too; ``top`` reads files and URLs for that. Counters come in, from ``spark``, ``receive`` and a proxy's
status; dictionaries of figures go out. The figures are declared where they are counted (``counters``).
"""
