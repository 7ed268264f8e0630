"""What is measured, and its outlets.

``metric`` says what a metric is, ``catalogue`` has all of them, ``figures`` makes them of the counters. ``batches`` and
``states`` sum up a sink's batches, ``source`` a source; ``store`` keeps both at ``metricsLocation``. ``prometheus``,
``view`` and ``top`` show them; ``view`` shows a proxy, too. What comes in are counters, from ``spark`` and ``receive``,
and a proxy's status; what goes out is plain data.
"""
