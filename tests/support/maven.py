"""A jar from Maven Central: fetched once, checked each time."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest

_CENTRAL = "https://repo1.maven.org/maven2"
_TIMEOUT_SECONDS = 20


class Jar(NamedTuple):
    """Which one, and what it must be."""

    group: str
    name: str
    version: str
    sha256: str


# Spark's Avro, which PySpark does not have. It also runs on the next minor version.
SPARK_AVRO = Jar(
    "org.apache.spark",
    "spark-avro_2.13",
    "4.2.0",
    "4c186cedc03cbe4ee356a94b32232b347ef48611c3209400b3a77e4fe4abff4f",
)


def fetched(jar: Jar) -> Path:
    """Where it is. Skips the test if it cannot be had; fails if it is not what it must be.

    ``MAVEN_CENTRAL`` names another repository of the same layout.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zmq_datasource"
    file = cache / f"{jar.name}-{jar.version}.jar"
    if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == jar.sha256:
        return file
    central = os.environ.get("MAVEN_CENTRAL", _CENTRAL).rstrip("/")
    url = f"{central}/{jar.group.replace('.', '/')}/{jar.name}/{jar.version}/{file.name}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            content = response.read()
    except OSError as e:
        pytest.skip(f"{file.name} cannot be had from {central}: {e}; MAVEN_CENTRAL names another repository")
    found = hashlib.sha256(content).hexdigest()
    assert found == jar.sha256, f"{url}: its SHA-256 is {found}, expected {jar.sha256}"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache, delete=False) as new:
        new.write(content)
    os.replace(new.name, file)  # another run may do the same
    return file
