"""Run the tests with other versions, and keep in docs/compatibility.json what was run: see CONTRIBUTING.md.

`nox --list` shows the combinations, `nox --session "test(oldest)"` runs one of them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import nox

RECORD = Path("docs", "compatibility.json")
# Asked of the environment itself: what was installed, not what was asked for.
VERSIONS = """
import importlib.metadata as installed, json, os, platform, re, subprocess, zmq
java = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else "java"
said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
print(json.dumps({
    "Python": platform.python_version(),
    **{name: installed.version(package) for name, package in
        {"PySpark": "pyspark", "pyarrow": "pyarrow", "pyzmq": "pyzmq"}.items()},
    "libzmq": zmq.zmq_version(),
    "Java": re.search(r'version "([0-9.]+)', said)[1],
    "system": f"{platform.system()} {platform.machine()}",
}))
"""


@dataclass(frozen=True)
class Combination:
    """An interpreter, and what pip may install: the newest versions, unless said otherwise."""

    python: str
    java: str = "17"  # or newer, as the machine has it; 21 comes from the package index
    oldest: bool = False  # of all that pyproject.toml names
    pyspark: str | None = None


COMBINATIONS = {
    "oldest": Combination("3.11", oldest=True),
    "newest": Combination("3.11"),
    "pyspark-4.2": Combination("3.12", pyspark="4.2.*"),
    "java-21": Combination("3.12", java="21"),
    "python-3.13": Combination("3.13"),
    "python-3.14": Combination("3.14", java="21"),
}


@nox.session(venv_backend="none")
@nox.parametrize("name", [nox.param(name, id=name) for name in COMBINATIONS])
def test(session: nox.Session, name: str) -> None:
    """All tests but those that measure or take minutes; what follows -- goes to pytest, and then nothing is kept."""
    combination = COMBINATIONS[name]
    python = shutil.which(f"python{combination.python}") or session.skip(
        f"no python{combination.python} on the PATH"
    )
    place = Path("build", "nox", name)
    place.mkdir(parents=True, exist_ok=True)
    make = ["make", f"PYTHON={python}", f"VENV={place / 'venv'}"]
    environment = {"PIP_CONSTRAINT": str(constraints(session, combination, place).absolute())}
    if combination.java == "21":
        environment["JAVA_FROM"] = "package"
    targets = ["test-spark", "test-rest"]
    asked = {"PYTEST_ADDOPTS": " ".join(session.posargs)} if session.posargs else {}
    # The second make, so that both find one environment that is complete.
    session.run(*make, str(place / "venv" / "spark.jsa"), env=environment, external=True)
    session.run(
        *make, "--jobs", "2", f"REPORTS={place.absolute()}", *targets, env=environment | asked, external=True
    )
    session.run(*make, f"REPORTS={place.absolute()}", "test-slow", env=environment | asked, external=True)
    counts = [
        ElementTree.parse(place / f"{target}.xml").find("testsuite").attrib
        for target in [*targets, "test-slow"]
    ]
    java = 'java="$(scripts/java.sh "$0")" && eval "$java" && exec "$0/bin/python" -c "$1"'
    versions = session.run(
        "sh", "-c", java, str(place / "venv"), VERSIONS, env=environment, silent=True, external=True
    )
    found = json.loads(versions)
    if not found["Python"].startswith(combination.python):
        session.error(
            f"{python} was to be Python {combination.python}, and the tests ran with {found['Python']}"
        )
    if not session.posargs:
        keep(name, found, counts)


def constraints(session: nox.Session, combination: Combination, place: Path) -> Path:
    """What pip must obey."""
    path = place / "constraints.txt"
    path.write_text(f"pyspark=={combination.pyspark}\n" if combination.pyspark else "")
    if combination.oldest:
        resolve = ["uv", "pip", "compile", "--quiet", "--resolution", "lowest-direct", "--extra", "dev"]
        session.run(
            *resolve,
            "--python-version",
            combination.python,
            "--output-file",
            str(path),
            "pyproject.toml",
            external=True,
        )
    return path


def keep(name: str, versions: dict[str, str], counts: list[dict[str, str]]) -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    total = {key: sum(int(count[key]) for count in counts) for key in ("tests", "skipped")}
    record[name] = versions | {"passed": total["tests"] - total["skipped"], "skipped": total["skipped"]}
    RECORD.write_text(
        json.dumps({key: record[key] for key in COMBINATIONS if key in record}, indent=1) + "\n"
    )
