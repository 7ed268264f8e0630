"""The figures of sources, sinks and proxies, and how users see them.

``source`` computes the figures of a source from its counters. ``accounts`` adds up what a sink has written, batch by
batch. ``store`` keeps both at ``metricsLocation`` (with ``files``), and ``prometheus`` serves them. ``view`` shows
them, and a proxy's status, in tables and lines (with ``tables``); ``top`` reads files and URLs for it. The figures are
declared where they are counted (``counters``).
"""
