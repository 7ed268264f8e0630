"""The command: record traces, show them, compare or write the golden ones."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests import conftest  # noqa: F401 - it sets the environment of Spark up
from tests.spark_calls.on_spark import drive, record, recording_session
from tests.spark_calls.scenarios import SCENARIOS
from tests.spark_calls.traces import MINOR, golden, golden_versions, write_golden


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.spark_calls", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="write the golden traces of the installed PySpark"
    )
    parser.add_argument(
        "--only", action="append", choices=sorted(SCENARIOS), help="record this scenario; show it"
    )
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        drive(given.drive.split(","), given.round, given.directory)
        return
    with tempfile.TemporaryDirectory() as directory:
        traces = record(given.only or SCENARIOS, Path(directory), recording_session(Path(directory)))
    if given.only:
        print(json.dumps(traces, indent=1))
    known = golden(MINOR) if MINOR in golden_versions() else {}
    if given.write:
        all_known = known | traces
        print(f"written: {write_golden({name: all_known[name] for name in SCENARIOS if name in all_known})}")
    different = [name for name, lines in traces.items() if known.get(name) != lines]
    print(f"PySpark {MINOR}: {len(traces)} scenarios, other than the golden traces: {different or 'none'}")
    sys.exit(0 if given.write or not different else 1)


if __name__ == "__main__":
    main()
