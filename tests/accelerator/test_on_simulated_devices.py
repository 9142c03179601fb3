"""Runs the tests marked `accelerator` on simulated devices, each build in processes of its own.

Those of tests/accelerator are one half of the work and all others the other, so that two workers of pytest share it;
the first process that needs the simulated accelerator compiles it, under a lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.accelerator import simulator
from tests.accelerator.marked import PYTEST_OPTIONS, TESTS, marked_files

# A test that waits for ever, as it would on a device, must end before the one that runs it, which has 300 seconds.
TIMEOUT = ("--timeout=240", "--timeout-method=thread")
HALVES: dict[str, Callable[[Path], bool]] = {
    "accelerator": lambda path: path.parent == TESTS / "accelerator",
    "others": lambda path: path.parent != TESTS / "accelerator",
}


def run_marked_tests(build: str, half: str, expression: str) -> str:
    """The summary of a run of pytest on simulated devices, which must pass."""
    if reason := simulator.missing_requirement():
        pytest.skip(reason)
    command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, *TIMEOUT, "-m", expression]
    environment = {**os.environ, "GPIPE_TESTS_SIMULATE": build}
    answer = subprocess.run(
        [*command, *map(str, filter(HALVES[half], marked_files()))],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout.splitlines()[-1]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("build", ["cuda", pytest.param("sim", marks=pytest.mark.slow)])
def test_the_marked_tests_pass(build: str, half: str) -> None:
    assert " passed" in run_marked_tests(build, half, "accelerator and not slow")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("build", ["cuda", "sim"])
def test_the_slow_marked_tests_pass(build: str, half: str) -> None:
    assert " passed" in run_marked_tests(build, half, "accelerator and slow")
