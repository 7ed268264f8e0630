"""The ``source`` role on Spark itself: the same source, checkpoint and output as ``engine.Source``, and a real query.

The reader runs in Spark's Python processes, which get the faults of the role too: they import this module before the
package, because they unpickle its classes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tests.weather.faults import install

# The page of faults and the disk, in the environment of Spark's Python processes.
_VARIABLE = "WEATHER_FAULTS"
if _VARIABLE in os.environ:
    install(*map(Path, json.loads(os.environ[_VARIABLE])))

# ruff: noqa: E402 - the faults come before the package
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.types import StructType

from tests.weather.failpoints import Page
from zmq_datasource.host import failpoints
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.datasource import ZmqDataSource
from zmq_datasource.spark.stream_reader import ZmqStreamReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["WeatheredSource", "run_query"]

_COLUMNS = ("id", "publisher", "sequence", "value")


class _WeatheredReader(ZmqStreamReader):
    """Pickled by the name of this module, so that the tasks have the faults."""


class WeatheredSource(ZmqDataSource):
    """The source of the package, under the faults of the role."""

    @classmethod
    def name(cls) -> str:
        return "zmq-weathered"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _WeatheredReader(parse(StreamReadOptions, self.options))


def run_query(
    directory: Path, options: Mapping[str, str], faults: tuple[str, str], stopped: Callable[[float], bool]
) -> None:
    """Run a query until ``stopped``, which waits for so many seconds, says that it is to end.

    Args:
        faults: The page of faults and the disk of this role.

    A strike at a failpoint ends one Python process of Spark, and with it the query; then this process ends in the same
    way, as the reduced engine does.

    Raises:
        SystemExit: The query has failed; the last line of stderr has the error of the package, if there is one.
    """
    page = Page(Path(os.environ["WEATHER_FAILPOINTS"]))
    kills = page.kills
    from tests import conftest  # noqa: F401, PLC0415 - it sets the environment of Spark up
    from tests.support.streams import new_session  # noqa: PLC0415 - Spark's own processes do without

    os.environ[_VARIABLE] = json.dumps(faults)
    (directory / "out").mkdir(parents=True, exist_ok=True)
    session = new_session(directory)
    session.sparkContext.setLogLevel("OFF")
    session.dataSource.register(WeatheredSource)
    query = (
        session.readStream.format(WeatheredSource.name())
        .options(**options)
        .load()
        .writeStream.foreachBatch(lambda batch, number: _write(directory, batch, number))
        .option("checkpointLocation", str(directory))
        .start()
    )
    while query.isActive and not stopped(0.1):
        pass
    error = query.exception()
    if page.kills > kills:
        signal.raise_signal(signal.SIGKILL)
    query.stop()
    session.stop()
    if error is not None:
        lines = str(error).splitlines()
        print(error, file=sys.stderr)
        print(next((line for line in lines if "zmq_datasource.errors." in line), lines[-1]), file=sys.stderr)
        raise SystemExit(1)


def _write(directory: Path, batch: DataFrame, number: int) -> None:
    from tests.weather.engine import write_rows  # noqa: PLC0415 - as above

    rows = [list(row) for row in batch.select(*_COLUMNS).collect()]
    failpoints.reach("weather.output.before_write")
    write_rows(directory, number, rows)
    failpoints.reach("weather.commits.before_write")
