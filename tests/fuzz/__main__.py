"""Usage: python -m tests.fuzz [--seconds N] [--corpus DIR] [TARGET ...]

Each target in a process of its own, guided by coverage (atheris); it begins with the inputs that the repository keeps,
and adds those that it finds to the corpus directory. What a target cannot stand is left there as ``crash-...``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

KEPT = Path(__file__).parent / "corpus"


def fuzz(target: str, seconds: int, found: Path) -> None:
    import atheris  # noqa: PLC0415 - before what it is to instrument

    with atheris.instrument_imports(include=["zmq_datasource"]):
        from tests.fuzz.targets import TARGETS  # noqa: PLC0415
    # Fifteen seconds and a gigabyte for one input are a fault, too.
    limits = [
        f"-max_total_time={seconds}",
        "-timeout=15",
        "-rss_limit_mb=2048",
        "-max_len=8192",
        "-print_final_stats=1",
    ]
    (KEPT / target).mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    arguments = [sys.argv[0], *limits, f"-artifact_prefix={found}/", str(found), str(KEPT / target)]
    atheris.Setup(arguments, TARGETS[target])
    atheris.Fuzz()


def main() -> int:
    from tests.fuzz.targets import TARGETS  # noqa: PLC0415

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz"))
    parser.add_argument(
        "targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET", help=", ".join(TARGETS)
    )
    given = parser.parse_args()
    failed = []
    for target in given.targets or TARGETS:
        code = (
            f"from pathlib import Path; from tests.fuzz.__main__ import fuzz; "
            f"fuzz({target!r}, {given.seconds}, Path({str(given.corpus / target)!r}))"
        )
        print(f"== {target}", flush=True)
        if subprocess.run([sys.executable, "-c", code], check=False).returncode:
            failed.append(target)
    print(f"failed: {', '.join(failed)}" if failed else "nothing found that a target cannot stand")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
