"""Logging in the Python processes of Spark.

Spark starts these processes (source runner, commit runner, executors' workers) without a logging configuration. The
environment variable ``ZMQ_DATASOURCE_LOGGING`` gives one to all of them: the path of a JSON file for
``logging.config.dictConfig``.
"""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys

LOGGING_VARIABLE = "ZMQ_DATASOURCE_LOGGING"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_done = False


def set_up_worker() -> None:
    """Configure logging, once in each process, unless that is done already."""
    global _done
    if _done:
        return
    _done = True
    path = os.environ.get(LOGGING_VARIABLE)
    if path:
        with open(path, encoding="utf-8") as file:
            logging.config.dictConfig(json.load(file))
        return
    package = logging.getLogger("zmq_datasource")
    if not (package.handlers or any(not _is_sparks(handler) for handler in logging.getLogger().handlers)):
        # While Spark collects logs, sys.stderr is its own, and it would collect each line twice.
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(logging.Formatter(_FORMAT))
        package.addHandler(handler)
        package.setLevel(logging.INFO)


def _is_sparks(handler: logging.Handler) -> bool:
    """Whether a handler is Spark's, for ``spark.tvf.python_worker_logs()``.

    Spark shows a query's lines only in the query's own session, so they go to standard error, too.
    """
    return type(handler.formatter).__module__ == "pyspark.logger.worker_io"
