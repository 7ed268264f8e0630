"""The command: applies each patch in turn, a line each, and says which were caught."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.track_record.proof import Tree, Verdict
from tests.track_record.record import Patch, known_faults, read_patches


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.track_record", description=__doc__)
    parser.add_argument("names", nargs="*", help="only patches whose name contains one of these")
    parser.add_argument(
        "--jobs", type=int, default=3, help="how many to try side by side, each in its own copy"
    )
    parser.add_argument("--keep", action="store_true", help="leave the copies of the tree where they are")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the copies are removed then, too
    patches = [p for p in read_patches() if not given.names or any(name in p.name for name in given.names)]
    if not patches:
        parser.error(f"no patch in tests/track_record has one of {given.names} in its name")
    directory = Path(tempfile.mkdtemp(prefix="track-record-")).resolve()
    began = time.monotonic()
    try:
        verdicts = _prove(patches, directory, min(given.jobs, len(patches)))
    finally:
        if given.keep:
            print(f"copies of the tree: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    known = sorted(known_faults(), key=lambda fault: fault.line)
    for fault in known:
        print(f"known, still there: {fault.test}: {fault.reason}")
    caught = sum(verdict.caught for verdict in verdicts)
    print(
        f"{caught} of {len(verdicts)} faults caught, {len(known)} known and still there "
        f"({time.monotonic() - began:.0f} s)"
    )
    sys.exit(0 if caught == len(verdicts) else 1)


def _prove(patches: list[Patch], directory: Path, jobs: int) -> list[Verdict]:
    """Try all patches, in ``jobs`` copies of the tree at a time."""
    trees: SimpleQueue[Tree] = SimpleQueue()
    for number in range(jobs):
        root = directory / str(number)
        root.mkdir()
        trees.put(Tree(root))

    def prove(patch: Patch) -> Verdict:
        tree = trees.get()
        try:
            verdict = tree.prove(patch)
        finally:
            trees.put(tree)
        what = "caught" if verdict.caught else "NOT caught"
        print(
            f"{what:10} {patch.name} ({verdict.seconds:.1f} s) by {patch.caught_by}: {verdict.why[:240]}",
            flush=True,
        )
        return verdict

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(prove, patches))


if __name__ == "__main__":
    main()
