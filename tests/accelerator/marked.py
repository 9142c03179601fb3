"""The test files with tests for accelerators."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent.parent
PYTEST_OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
"""For a run of pytest inside a test: it keeps no files and starts no workers."""


def marked_files() -> list[Path]:
    """The files that name the marker, but for this file's users, which start those tests."""
    named = [
        path for path in sorted(TESTS.rglob("test_*.py")) if "pytest.mark.accelerator" in path.read_text()
    ]
    return [path for path in named if path.name != "test_on_simulated_devices.py"]
