"""Without any one synchronization of the package, a test on simulated devices fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.accelerator import simulator
from tests.accelerator.marked import TESTS, marked_files
from tests.accelerator.mutations import all_mutations


def found_and_missed(*files: str) -> tuple[list[str], list[str]]:
    """The mutations of the files, or of all, by whether a marked test failed."""
    if reason := simulator.missing_requirement():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.accelerator.mutations", *files]
    answer = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    lines = answer.stdout.splitlines()
    missed = [line for line in lines if line.endswith("NOT FOUND")]
    assert answer.returncode == len(missed), answer.stderr
    return [line for line in lines if line not in missed], missed


def test_a_wait_for_a_process_was_taken_for_one_for_a_device() -> None:
    """Its function had the name of one that waits for streams, in a folder without tests on simulated devices."""
    tested = {path.parent.name for path in marked_files()}
    assert [str(mutation) for mutation in all_mutations() if mutation.file.split("/")[0] not in tested] == []


@pytest.mark.slow
def test_without_any_synchronization_of_copies_between_partitions_a_test_fails() -> None:
    found, missed = found_and_missed("accelerator/copies.py")
    assert missed == []
    assert len(found) == sum(mutation.file == "accelerator/copies.py" for mutation in all_mutations()) >= 7


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_without_any_synchronization_a_test_fails() -> None:
    found, missed = found_and_missed()
    assert missed == []
    assert len(found) == len(all_mutations())
