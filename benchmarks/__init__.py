"""Benchmarks of zmq_datasource, side by side with raw pyzmq and with the usual tutorial source.

Run ``python -m benchmarks`` in the root of the repository; ``--help`` shows the options.
"""
