"""A small JSON file for each account, at ``metricsLocation``:

    <location>/date=<day, UTC>/batch-<query>-<batch>-<write>.json

``spark.read.json`` reads them all. A file appears whole. If Spark repeats a batch, its accounts are there twice, and
those of the newest ``execution`` count.
"""

from __future__ import annotations

import logging
import re
import threading
import uuid
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from urllib.parse import quote

from zmq_datasource.errors import MetricsError
from zmq_datasource.host import failpoints
from zmq_datasource.host.locations import directory_of, without_secrets
from zmq_datasource.monitoring.accounts import Account
from zmq_datasource.options.types import Location

_log = logging.getLogger(__name__)

_DAY = re.compile(r"date=(\d{4}-\d\d-\d\d)")
_FILE = re.compile(r"(\.[0-9a-f]{32}-)?batch-.+\.json")


def keep(location: Location, account: Account, retention: float, seconds: float) -> None:
    """Write the file of an account. The first one of a day also removes old days.

    Args:
        retention: Seconds that accounts are kept.
        seconds: The wait for the file system, whose calls may hang.

    Raises:
        MetricsError: The file system refuses, or has not answered in time.
    """
    results: list[MetricsError | None] = []

    def run() -> None:
        try:
            is_first = _write(location, account)
            results.append(None)
            if is_first:
                remove_old_days(location, retention, account.seconds)
        # Each file system raises its own errors, and their texts may hold a secret.
        except Exception as e:
            results.append(MetricsError(f"{what}: {without_secrets(e, location)}"))

    what = f"writing the account of batch {account.batch} in {location}"
    thread = threading.Thread(target=run, name="zmq-metrics", daemon=True)
    thread.start()
    thread.join(seconds)
    error = (
        results[0] if results else MetricsError(f"{what}: the file system has not answered for {seconds:g} s")
    )
    if error is not None:
        raise error


def _write(location: Location, account: Account) -> bool:
    """Write the file under a hidden name, and rename it. Returns whether it is the first file of its day."""
    from pyarrow import fs  # noqa: PLC0415 - see directory_of

    name = f"batch-{quote(account.query, safe='')}-{account.batch}-{quote(account.write, safe='')}.json"
    system, root = directory_of(location)
    day = f"{root.rstrip('/')}/date={datetime.fromtimestamp(account.seconds, UTC):%Y-%m-%d}"
    is_first: bool = system.get_file_info(day).type == fs.FileType.NotFound
    system.create_dir(day, recursive=True)
    hidden = f"{day}/.{uuid.uuid4().hex}-{name}"
    try:
        failpoints.reach("monitoring.metrics.before_write")
        with system.open_output_stream(hidden) as file:
            file.write(account.to_json())
        failpoints.reach("monitoring.metrics.before_move")
        system.move(hidden, f"{day}/{name}")
        failpoints.reach("monitoring.metrics.after_move")
    except BaseException:
        with suppress(OSError):
            system.delete_file(hidden)
        raise
    return is_first


def remove_old_days(location: Location, retention: float, now: float) -> None:
    """Remove the folders of days that ended more than ``retention`` seconds ago. Never raises.

    The clock alone removes nothing: there must also be a folder of another day before today that is as much newer. So a
    clock that is set forward does not empty the location. A folder that holds other files is left alone.
    """
    from pyarrow import fs  # noqa: PLC0415 - see directory_of

    try:
        system, root = directory_of(location)
        today = datetime.fromtimestamp(now, UTC).date()
        days = {_day(info.base_name): info.path for info in system.get_file_info(fs.FileSelector(root))}
        newest = max((day for day in days if day is not None and day < today), default=date.min)
        for day, path in days.items():
            if day is None or (newest - day).total_seconds() < retention:
                continue
            if now - datetime.combine(day + timedelta(1), time(), UTC).timestamp() < retention:
                continue
            held = system.get_file_info(fs.FileSelector(path, recursive=True))
            if all(info.type == fs.FileType.File and _FILE.fullmatch(info.base_name) for info in held):
                system.delete_dir(path)
    # As above.
    except Exception as e:
        _log.warning("removing old days from %s: %s", location, without_secrets(e, location))


def _day(name: str) -> date | None:
    found = _DAY.fullmatch(name)
    with suppress(ValueError):
        return None if found is None else date.fromisoformat(found[1])
    return None
