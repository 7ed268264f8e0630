"""Experiments with high-water marks (``experiment``, ``results``), a look into a log (``log``), and the ``doctor``."""
