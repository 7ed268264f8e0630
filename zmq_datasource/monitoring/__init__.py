"""What is measured, and its outlets.

``metric`` says what a metric is, ``catalogue`` has all of them, ``figures`` makes them of the counters. ``batches`` and
``states`` sum up a sink's batches, ``source`` a source; ``store`` keeps both at ``metricsLocation``. ``prometheus``,
``view`` and ``top`` show them. What comes in are counters, from ``spark`` and ``receive``; what goes out is plain data.
"""
