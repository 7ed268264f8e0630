"""Builds the compiled core (``transport/_core.c``) with the package, where there is a C compiler.

Without one the package is pure Python and works in the same way, more slowly. ``ZMQ_DATASOURCE_CORE=compiled`` in the
environment makes a failure an error, ``ZMQ_DATASOURCE_CORE=python`` does not try.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_DIRECTORY = Path("zmq_datasource", "transport")


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Gives wheels the compiled core, and puts it beside its source for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        editable = version == "editable"
        if editable:  # what an older source was compiled to must not be used
            for stale in (root / _DIRECTORY).glob("_core.*.so"):
                stale.unlink()
        wanted = os.environ.get("ZMQ_DATASOURCE_CORE", "")
        if wanted == "python":
            return
        try:
            built = _compile(root, root / (_DIRECTORY if editable else "build"))
        except Exception as e:
            if wanted == "compiled":
                raise
            self.app.display_warning(f"the compiled core is left out, so that everything is slower: {e}")
            return
        if not editable:
            build_data["force_include"][str(built)] = (_DIRECTORY / built.name).as_posix()
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"


def _compile(root: Path, directory: Path) -> Path:
    """The shared library, made in ``directory``."""
    from setuptools import Distribution, Extension  # noqa: PLC0415 - a build may do without it

    core = Extension(
        "_core",
        [str(root / _DIRECTORY / "_core.c")],
        py_limited_api=True,
        extra_compile_args=[] if sys.platform == "win32" else ["-std=c11", "-O2", "-Wall", "-Wextra"],
    )
    distribution = Distribution({"name": "zmq_datasource", "ext_modules": [core]})
    command = distribution.get_command_obj("build_ext")
    command.build_temp = str(root / "build")
    command.build_lib = str(directory)
    command.ensure_finalized()
    command.run()
    (output,) = command.get_outputs()
    return Path(output)
