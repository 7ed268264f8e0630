"""Makes Spark start quickly in the tests' own environment.

Usage: python -m tests.support.spark_archive FILE

* FILE becomes an archive of the classes that Spark loads, with which a JVM starts in half the time. It fits one Java
  and one PySpark; ``conftest`` uses it where it is, and Java leaves it alone where it does not fit.
* Spark has its Python processes import PySpark from a zip without compiled code, in front of the installed package:
  each of them compiles half a second of source. A ``.pth`` file of this environment takes the zip out of the path.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path

_WITHOUT_ZIPS = """\
import sys; sys.path[:] = [e for e in sys.path if "/pyspark/python/lib/" not in e or not e.endswith(".zip")]
"""


def main() -> None:
    archive = Path(sys.argv[1])
    archive.unlink(missing_ok=True)
    assert sys.prefix != sys.base_prefix, "this changes the environment, so it must be a virtual one"
    Path(sysconfig.get_path("purelib"), "without_pyspark_zip.pth").write_text(_WITHOUT_ZIPS)
    from tests.conftest import JVM_OPTIONS  # noqa: PLC0415 - it sets the environment up

    os.environ["SPARK_SUBMIT_OPTS"] = f"{JVM_OPTIONS} -XX:ArchiveClassesAtExit={archive} -Xlog:cds=off"
    from tests.support import free_endpoint  # noqa: PLC0415 - only now
    from tests.support.streams import feed, new_session, start  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as directory:
        session = new_session(Path(directory))
        # A source, a sink and files: what most tests use.
        rows = session.range(100).selectExpr("cast(id as string) as value")
        rows.write.parquet(f"{directory}/rows")
        silent = feed(session, bind=free_endpoint(), walLocation=f"{directory}/wal", timeout="100ms")
        start(silent, Path(directory, "out"), availableNow=True).awaitTermination()
        sent = (
            session.readStream.schema("value string").parquet(f"{directory}/rows").writeStream.format("zmq")
        )
        sent = (
            sent.option("connect", free_endpoint())
            .option("noblock", "true")
            .option("connectTimeout", "100ms")
        )
        sent = sent.option("checkpointLocation", f"{directory}/checkpoint").trigger(availableNow=True)
        sent.start().awaitTermination()
        session.read.parquet(f"{directory}/rows").selectExpr("from_json(value, 'a int')").collect()
        jvm = session.sparkContext._gateway.proc
        session.stop()
        # It writes the archive when it ends, for some seconds: the tests look for it when they begin.
        jvm.stdin.close()
        jvm.wait(timeout=120)
    assert archive.exists()


if __name__ == "__main__":
    main()
