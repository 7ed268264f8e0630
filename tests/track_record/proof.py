"""Copies the tree, applies a patch, runs the named test there, and judges the result."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.track_record.record import REPOSITORY, Patch, git_apply

_CORE = "zmq_datasource/transport/_core.c"
_BUILD = "import hatch_build; from pathlib import Path; hatch_build._compile(Path(), Path('zmq_datasource/transport'))"
_SECONDS = 150.0
# How the processes of one seed interleave is up to the machine, so a fault may need several runs of its seed.
_RUNS_OF_A_SEED = 3


class Verdict(NamedTuple):
    """What became of one patch. ``why`` is the red test's own last words, or what is wrong with the proof."""

    patch: Patch
    caught: bool
    why: str
    seconds: float


class _Run(NamedTuple):
    """One run of the named test: it is red only if the test itself ran and failed."""

    red: bool
    green: bool
    words: str


class Tree:
    """A copy of the working tree, in which patches are applied in turn."""

    def __init__(self, root: Path) -> None:
        self.root = root
        _copy(root)
        self._green: dict[str, _Run] = {}
        # Python must notice every change of a patch: it goes by the time and the size of a file otherwise.
        self._python(
            "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "zmq_datasource", "tests"
        )
        child = (
            "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True, cwd='/')"
        )
        found = self._python(
            "-c", child, "import zmq_datasource, tests; print(zmq_datasource.__file__, tests.__file__)"
        )
        expected = f"{root}/zmq_datasource/__init__.py {root}/tests/__init__.py"
        if found.strip() != expected:
            raise RuntimeError(f"a process of the copy imports {found.strip()!r} instead of {expected!r}")

    def prove(self, patch: Patch) -> Verdict:
        """Run the named test without the patch, which must be green, and with it, which must be red."""
        began = time.monotonic()
        caught, why = self._judge(patch)
        return Verdict(patch, caught, why, time.monotonic() - began)

    def _judge(self, patch: Patch) -> tuple[bool, str]:
        complaint = git_apply(patch, self.root, "--check")
        if complaint:
            return False, f"does not apply: {complaint}"
        without = self._green.get(patch.caught_by)
        if without is None:
            without = self._green[patch.caught_by] = self._run(patch)
        if not without.green:
            return (
                False,
                f"without the patch {'it is red' if without.red else 'it does not run'}: {without.words}",
            )
        with self._applied(patch):
            for _ in range(_RUNS_OF_A_SEED if patch.seed else 1):
                run = self._run(patch)
                if not run.green:
                    break
        if run.green:
            return False, "it is green with the patch"
        return run.red, run.words if run.red else f"with the patch it does not run: {run.words}"

    @contextmanager
    def _applied(self, patch: Patch) -> Iterator[None]:
        git_apply(patch, self.root)
        builds = _CORE in patch.files
        built = {path: path.read_bytes() for path in self._cores()} if builds else {}
        try:
            if builds:
                self._python("-c", _BUILD)
            yield
        finally:
            complaint = git_apply(patch, self.root, "--reverse")
            for path, content in built.items():
                path.unlink(missing_ok=True)  # a process that is still there keeps its own file
                path.write_bytes(content)
            if complaint:
                raise RuntimeError(f"taking back {patch.path.name}: {complaint}")

    def _cores(self) -> list[Path]:
        return sorted(Path(self.root, "zmq_datasource", "transport").glob("_core.*"))

    def _run(self, patch: Patch) -> _Run:
        if patch.seed:
            code, output = self._call("-m", "tests.weather", *patch.seed, "--seeds", "1")
            found = re.search(r"FAILED: (.*)", output)
            words = found[1] if found else _last_line(output)
            return _Run(code == 1 and found is not None, code == 0, words)
        code, output = self._call(
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--timeout",
            str(_SECONDS - 30),
            patch.caught_by,
        )
        # Code 1: a test failed. Others: it does not exist, cannot be imported, or pytest itself was ended, perhaps
        # after the test had failed: a fault by which something waits for ever may keep the process from its end.
        red = code == 1 or re.search(r"^\d+ failed", output, re.MULTILINE) is not None
        green = code == 0 and re.search(r"^\d+ skipped", output, re.MULTILINE) is None
        return _Run(red, green, _last_line(output))

    def _call(self, *arguments: str) -> tuple[int, str]:
        """Run Python in the copy, in a process group that is ended with it. Returns its exit code and output."""
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.root,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                _kill_group(process)
            output.seek(0)
            text = output.read().decode(errors="replace")
        return code, text if code != -1 else f"{text}\nnot ended within {_SECONDS:.0f} s"

    def _python(self, *arguments: str) -> str:
        code, output = self._call(*arguments)
        if code != 0:
            raise RuntimeError(f"python {' '.join(arguments)} ended with {code}: {output}")
        return output

    def _environment(self) -> dict[str, str]:
        # An editable install puts the original tree at the end of the path; this is before it, in children too.
        ours = {"PYTHONPATH": str(self.root), "PYSPARK_PYTHON": sys.executable}
        # Bytecode that a run writes is valid by second and size, which a patch of one digit may leave as they are.
        ours["PYTHONDONTWRITEBYTECODE"] = "1"
        return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | ours


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _copy(root: Path) -> None:
    """Copy the files of the working tree as they are now, and the compiled core; not what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    names = {Path(name) for name in listed.stdout.split("\0") if name}
    names |= {path.relative_to(REPOSITORY) for path in REPOSITORY.glob("zmq_datasource/transport/_core.*.so")}
    for name in sorted(names):
        source, target = REPOSITORY / name, root / name
        if source.is_file():  # one that is deleted and not yet committed is still listed
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _last_line(output: str) -> str:
    """Why a test failed, as pytest's summary has it; otherwise the last line there is."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    summary = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    reasons = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    if summary and " - " not in summary[-1] and reasons:
        return reasons[0]
    return (summary or lines or ["no output"])[-1].rpartition(" - ")[2]
