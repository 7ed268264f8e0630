"""Why a query has failed, in one sentence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.connect.streaming.query import StreamingQuery as ConnectQuery
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["reason"]

# A traceback ends with the error, behind which Spark writes its own.
_ERROR = re.compile(
    r"^(?:zmq_datasource\.errors\.)(\w+: .*?)(?=\n SQLSTATE|\n\n|\n\tat |\n=== |\Z)", re.MULTILINE | re.DOTALL
)


def reason(failed: StreamingQuery | ConnectQuery | BaseException) -> str | None:
    """Say why a query, a read or a write has failed, without Spark's stack of Python and Java frames.

    >>> query.awaitTermination()  # doctest: +SKIP
    >>> reason(query)  # doctest: +SKIP
    'EndpointError: binding tcp://*:5556: Address already in use; ...'

    Args:
        failed: A query, or what ``load``, ``save``, ``collect`` or ``awaitTermination`` has raised.

    Returns:
        This package's error with its way out (docs/errors.md). If the error is another one, the first line that Spark
        says. None if the query has not failed.
    """
    error = failed if isinstance(failed, BaseException) else failed.exception()
    if error is None:
        return None
    text = str(error).strip()
    found = _ERROR.findall(text)
    # Of a chain of errors the last one is what the others led to.
    return str(found[-1]).strip() if found else text.partition("\n")[0]
