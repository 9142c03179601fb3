"""Checks of a run directory after a fault: its snapshots, the rows of metrics.jsonl, or that it is empty."""

from __future__ import annotations

from tests.support.fault_injection import MORE_EPOCHS, ROWS, SandboxStep, rows
from tests.support.sandbox import Sandbox


def has_snapshots(*steps: int) -> SandboxStep:
    """Exactly these: no temporary folder, and no snapshot of a step that failed."""

    def after(sandbox: Sandbox) -> None:
        assert sandbox.snapshots() == [f"step-{step:08d}" for step in steps], sandbox.snapshots()

    return after


def free_the_disk(sandbox: Sandbox) -> None:
    """Check that the failed save left the snapshot before it and no files of its own."""
    has_snapshots(2)(sandbox)
    (sandbox.run / "filler").unlink()


def all_rows(sandbox: Sandbox) -> None:
    assert sandbox.rows() == rows(MORE_EPOCHS)
    assert sandbox.stderr.count("warning") == 1, sandbox.stderr
    log = (sandbox.run / "train.log").read_text().splitlines()
    assert all(line[:2] == "20" for line in log) and "step 32 " in log[-2], log


def whole_rows(sandbox: Sandbox) -> None:
    """The disk never recovered: the file has whole rows only, and the run reports how many are lost."""
    assert sandbox.rows() == ROWS[: len(sandbox.rows())] and len(sandbox.rows()) < len(ROWS)
    assert "training continues" in sandbox.stderr and "are lost" in sandbox.stderr


def no_run_was_written(sandbox: Sandbox) -> None:
    assert not sandbox.run.exists() or not list(sandbox.run.iterdir())


def only_run_files(sandbox: Sandbox) -> None:
    """No file with offloaded parameters outlives the process."""
    known = {
        "config.yaml",
        "paths.json",
        "overrides.yaml",
        "env.json",
        "train.log",
        "metrics.jsonl",
        "snapshots",
        "run.lock",
        "inference.json",
        "launch.json",
        "layers.json",
        "trace.json",
        "timeline.json",
        "predictions.json",
    }
    assert {path.name for path in sandbox.run.iterdir()} <= known
