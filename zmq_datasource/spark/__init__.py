"""Spark's interfaces: readers and writers for ``format("zmq")``, and the metrics in a user's session.

Only this room and ``functions`` import pyspark. It is not installed with the package, because a platform brings its
own.
"""

from importlib.util import find_spec

if find_spec("pyspark") is None:
    raise ImportError(
        "this needs PySpark 4.2 or newer, which is not installed: pip install 'zmq_datasource[spark]' (or "
        "pyspark-client, for Spark Connect only)",
        name="pyspark",
    )

from pyspark import __version__

if tuple(int(part) for part in __version__.split(".")[:2]) < (4, 2):
    raise ImportError(
        f"this needs PySpark 4.2 or newer, and {__version__} is installed: older releases lack a part of the interface "
        "for Python data sources. Install a newer one: pip install --upgrade 'pyspark>=4.2'",
        name="pyspark",
    )
