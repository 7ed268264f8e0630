"""Spark's interfaces: options in, readers and writers out; and what sources and sinks tell, shown in a user's session.

The only room that imports pyspark, which is not installed with the package: a platform brings its own.
"""

from importlib.util import find_spec

if find_spec("pyspark") is None:
    raise ImportError(
        "this needs PySpark 4.2 or newer, which is not installed: pip install 'zmq_datasource[spark]' (or "
        "pyspark-client, for Spark Connect alone)",
        name="pyspark",
    )

from pyspark import __version__

if tuple(int(part) for part in __version__.split(".")[:2]) < (4, 2):
    raise ImportError(
        f"this needs PySpark 4.2 or newer, and {__version__} is installed: the Python data sources of older "
        "releases lack what it is made of. Install a newer one: pip install --upgrade 'pyspark>=4.2'",
        name="pyspark",
    )
