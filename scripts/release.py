"""The two ends of `make release`: whether this checkout can become a release, and what to do when all is built.

`release.py ready` ends with exit code 1 and each reason. `release.py next` prints the next steps.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# pyproject.toml reads the version of the package, so it is not here.
PLACES = {
    "zmq_datasource/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "CHANGELOG.md": r"^## \[(\d.*)\] - \d{4}-\d\d-\d\d$",  # the first one is the newest
}


def versions() -> dict[str, str]:
    """The version that each file names."""
    found = {}
    for place, pattern in PLACES.items():
        match = re.search(pattern, (ROOT / place).read_text(), re.MULTILINE)
        found[place] = match[1] if match else "none"
    return found


def obstacles() -> list[str]:
    """Why this checkout cannot become a release; empty if it can."""
    reasons = []
    if changed := git("status", "--porcelain"):
        reasons.append(f"the tree is dirty: commit or remove these\n{changed}")
    found = versions()
    if len(set(found.values())) > 1:
        named = ", ".join(f"{version} in {place}" for place, version in found.items())
        reasons.append(f"the versions differ: {named}")
    if "\n## [Unreleased]\n" in (ROOT / "CHANGELOG.md").read_text():
        reasons.append("CHANGELOG.md has a section [Unreleased]: give it the version and the date")
    tag = f"v{found['zmq_datasource/__init__.py']}"
    # The workflow runs on the tag itself.
    if (tagged := git("tag", "--list", tag, "--format=%(objectname)%(*objectname)")) and git(
        "rev-parse", "HEAD"
    ) not in tagged:
        reasons.append(f"the tag {tag} is on another commit: the next release needs another version")
    return reasons


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    if sys.argv[1] == "ready":
        if reasons := obstacles():
            sys.exit("\n".join(f"No release: {reason}" for reason in reasons))
        return
    tag = f"v{versions()['zmq_datasource/__init__.py']}"
    print(
        f"dist/ and build/site are ready. Next, when CI is green for this commit:\n"
        f"  git tag --annotate {tag} --message {tag} && git push origin {tag}\n"
        f"The workflow release.yml then builds all of it again, for macOS too, and publishes it."
    )


if __name__ == "__main__":
    main()
