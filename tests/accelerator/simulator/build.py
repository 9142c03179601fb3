"""Compiles the simulated accelerator once per torch version, Python ABI and source, into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
from torch.utils import cpp_extension

TESTED_TORCH = "2.13.0"
SOURCES = Path(__file__).parent / "csrc"
FLAGS = ["-O1", "-Wall", "-Wno-unknown-pragmas"]

Build = Literal["cuda", "sim"]
"""cuda: poses as torch's CUDA. sim: a PrivateUse1 device of that name."""


def missing_requirement() -> str | None:
    """Why the simulator cannot be compiled here, or None."""
    if torch.version.cuda or torch.version.hip:
        return "this torch has a real CUDA, which the simulated accelerator would replace"
    for program in ("g++", "ninja"):
        if shutil.which(program) is None:
            return f"the simulated accelerator needs {program}, which is not installed"
    return None


def compiled(build: Build) -> ModuleType:
    """The extension module, compiled if the cache does not have it. Loading it adds the devices to this process."""
    version = torch.__version__.partition("+")[0]
    if version != TESTED_TORCH:
        raise RuntimeError(
            f"the simulated accelerator replaces internals of torch {TESTED_TORCH}, and this is torch {version}: "
            "check csrc/hooks.cpp against the new version, run the sweep, then change TESTED_TORCH"
        )
    directory = _cache_directory(build)
    directory.mkdir(parents=True, exist_ok=True)
    name = f"gpipe_simulator_{build}"
    library = directory / f"{name}.so"
    with (directory / "compiling.lock").open("w") as lock:
        # The first process compiles; the others wait and find the library complete.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            # As one file: compiling torch's headers takes most of the time of each.
            every_source = directory / "simulator.cpp"
            lines = [f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp"))]
            every_source.write_text("".join(lines), encoding="utf-8")
            cpp_extension.load(
                name,
                [str(every_source)],
                extra_cflags=[*FLAGS, *(["-DSIM_CUDA"] if build == "cuda" else [])],
                build_directory=str(directory),
                is_python_module=False,
            )
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache_directory(build: Build) -> Path:
    digest = hashlib.sha256(
        " ".join([torch.__version__, str(sysconfig.get_config_var("SOABI")), *FLAGS]).encode()
    )
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "gpipe-simulator" / f"{build}-{digest.hexdigest()[:16]}"
