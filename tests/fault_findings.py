"""What is found in a run directory after a fault: snapshots, rows of metrics.jsonl, nothing at all."""

from __future__ import annotations

from tests.fault_injection import LONGER, ROWS, Act, rows
from tests.scene import Scene


def has_snapshots(*steps: int) -> Act:
    """These and nothing else: no temporary, none of a step that failed."""

    def after(scene: Scene) -> None:
        assert scene.snapshots() == [f"step-{step:08d}" for step in steps], scene.snapshots()

    return after


def make_room(scene: Scene) -> None:
    """The failed save has left the one before, and nothing of itself."""
    has_snapshots(2)(scene)
    (scene.run / "filler").unlink()


def all_rows(scene: Scene) -> None:
    assert scene.rows() == rows(LONGER)
    assert scene.said.count("warning") == 1, scene.said
    log = (scene.run / "train.log").read_text().splitlines()
    assert all(line[:2] == "20" for line in log) and "step 32 " in log[-2], log


def whole_rows(scene: Scene) -> None:
    """The disk never came back: what is in the file is whole, and what is not is counted."""
    assert scene.rows() == ROWS[: len(scene.rows())] and len(scene.rows()) < len(ROWS)
    assert "training goes on" in scene.said and "are lost" in scene.said


def nothing_was_made(scene: Scene) -> None:
    assert not scene.run.exists() or not list(scene.run.iterdir())


def only_what_a_run_leaves(scene: Scene) -> None:
    """No file of the model outlives the process, whatever ended it."""
    known = {
        "config.yaml",
        "overrides.yaml",
        "env.json",
        "train.log",
        "metrics.jsonl",
        "snapshots",
        "run.lock",
        "launch.json",
    }
    assert {path.name for path in scene.run.iterdir()} <= known
