"""What a run runs on: versions, processor, devices, and the state of the git checkout."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpipe_cli import __version__

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "rich", "numpy", "safetensors")


def environment() -> dict[str, Any]:
    """Facts for env.json. Never environment variables: they may hold secrets."""
    return {
        "gpipe": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory_gib": memory_gib(),
        **_devices(),
        **_checkout(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    import torch

    from gpipe_cli.accelerator.devices import accelerators, device_name

    present = accelerators()
    return {
        "accelerator": present[0].type if present else None,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "devices": [device_name(device) for device in present] or ["cpu"],
        "threads": torch.get_num_threads(),
    }


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def process_peak_bytes() -> int | None:
    """The most memory that this process has held at once; None where the system does not report it.

    getrusage would also count the peak of the process that started this one.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:  # not Linux
        return None
    peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if peak is None else int(peak) * 1024


def memory_gib() -> float | None:
    if sys.platform != "linux":
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _checkout() -> dict[str, Any]:
    """The commit of the current directory, if it is a git checkout."""
    commit = _git("rev-parse", "HEAD")
    return {} if commit is None else {"git": commit, "git_dirty": bool(_git("status", "--porcelain"))}


def _git(*arguments: str) -> str | None:
    try:
        process = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git, or one that hangs on a slow disk
        return None
    return process.stdout.strip() if process.returncode == 0 else None
