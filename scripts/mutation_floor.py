"""The end of `make mutate`: prints the share of mutants that a test catches, and fails if it is below the floor.

The floor only rises. Raise it when a run prints a higher share.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Per cent of all mutants of the modules that [tool.mutmut] in pyproject.toml names.
FLOOR = 88
RESULTS = Path("mutants/mutmut-cicd-stats.json")
# Caught is also a mutant whose test does not end: mutmut kills it in time.
CAUGHT = ("killed", "timeout", "segfault")
NOT_CAUGHT = ("survived", "no_tests", "suspicious")


def main() -> None:
    subprocess.run([Path(sys.executable).with_name("mutmut"), "export-cicd-stats"], check=True)
    counts = json.loads(RESULTS.read_text())
    caught, tested = (sum(counts[name] for name in names) for names in (CAUGHT, CAUGHT + NOT_CAUGHT))
    if not tested:
        sys.exit("No mutant was tried. Run mutmut first.")
    share = 100 * caught / tested
    print(", ".join(f"{name} {counts[name]}" for name in CAUGHT + NOT_CAUGHT))
    print(f"{caught} of {tested} mutants are caught: {share:.1f} %; the floor is {FLOOR} %")
    if tested < counts["total"] - counts["skipped"]:
        print(f"Only some of {counts['total']} mutants were tried, so the floor does not count.")
    elif share < FLOOR:
        sys.exit(
            "Below the floor: `mutmut results` lists the mutants that no test notices, `mutmut show` one of them."
        )


if __name__ == "__main__":
    main()
