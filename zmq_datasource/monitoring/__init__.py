"""The figures of sources, sinks and proxies, and how users see them.

``source`` computes the figures of a source from its counters. ``accounts`` adds up what a sink has written, batch by
batch, and ``files`` keeps each account at ``metricsLocation``. ``prometheus`` serves figures. ``view`` shows them in
tables and lines (with ``tables``). The figures are declared where they are counted (``counters``).
"""
