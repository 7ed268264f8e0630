"""Whether Spark's Python workers will find this package: they may run another Python than the driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

__all__ = ["why_workers_lack_package"]

_PROBE = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('zmq_datasource') else 3)"
_LACKING = 3
# It takes some hundredths of a second; a machine that is so slow is not asked.
_PATIENCE_SECONDS = 1.0


def why_workers_lack_package(command: str) -> str | None:
    """Why the interpreter of Spark's workers cannot import this package; None if it can, or if that is not known.

    Args:
        command: Its name or path: ``PYSPARK_PYTHON``, else ``python3``.
    """
    path = shutil.which(command)
    way_out = f"activate the environment in {sys.prefix} before Spark starts, or set PYSPARK_PYTHON={sys.executable}"
    if path is None:
        return f"Spark's Python workers would be started with {command!r}, which is not here; {way_out}"
    if _environment(path) == _environment(sys.executable):
        return None
    try:
        done = subprocess.run(
            [path, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != _LACKING:
        return None
    return (
        f"Spark's Python workers are started with {path} (PYSPARK_PYTHON, or python3 on the PATH), which does not have "
        f"zmq_datasource: Spark will not find format('zmq') (DATA_SOURCE_NOT_FOUND, ModuleNotFoundError). To mend it, "
        f"{way_out}"
    )


def _environment(executable: str) -> tuple[str, str]:
    """The interpreter, and the directory that says which environment it runs in: of a venv it is a link."""
    return os.path.realpath(executable), os.path.dirname(os.path.abspath(executable))
