"""What is measured, and its outlets.

``metric`` says what a metric is, ``catalogue`` has all of them, ``figures`` makes them of the counters. ``batches`` and
``states`` sum up a sink's batches, ``source`` a source; ``store`` keeps both at ``metricsLocation``, and ``prometheus``
serves them. ``view`` shows them in tables and lines, those of a proxy too; ``top`` reads files and URLs for that. What
comes in are counters, from ``spark`` and ``receive``, and a proxy's status; what goes out is plain data.
"""
