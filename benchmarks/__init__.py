"""Benchmarks of zmq_datasource, side by side with the usual tutorial source, Kafka, and loops in C.

Run ``python -m benchmarks`` in the root of the repository; ``--help`` shows the options.
"""
