"""Runs that are trained once per worker: a test gets a copy, which it may resume, damage or evaluate."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

from gpipe_cli.cli import main
from tests.support.user_models import TINY, TINY_TRAINING

GPT = ("model=gpt", "model.width=16", "model.depth=2", "model.heads=2", "data.context=8", "threads=1")
"""The words that name the model of the run `gpt`, for commands that use a file of its weights."""
RUNS = {
    # Six of eight steps with an evaluation after the fourth, one snapshot, and nothing that decides the best one.
    "tiny": (*TINY_TRAINING, "steps=6", "snapshot.every=2", "threads=1"),
    "gpt": (*GPT, "steps=3", "balance=uniform", "batch_size=8", "chunks=2", "data.stride=400"),
    "digits": ("model=mlp", "model.width=16", "model.depth=1", "data.size=8", "steps=2", "threads=1"),
    "unet": (
        *("model=unet", "model.depth=2", "model.base_channels=4", "data.length=8", "data.size=16"),
        *("steps=1", "batch_size=4", "chunks=2", "threads=1"),
    ),
}

TrainedRun = Callable[[str], Path]
"""Copies the run of this name to ./run: the fixture `trained_run`."""


@cache
def trained_once(name: str, folder: Path) -> Path:
    """Train the run in a folder of its own, as run_dir=run, so that its files name the copies too."""
    folder.mkdir()
    (folder / "tiny_for_tests.py").write_text(TINY, encoding="utf-8")
    with contextlib.chdir(folder):
        assert main(["train", *RUNS[name], "run_dir=run"]) == 0
    return folder / "run"


def copy_run(run: Path, folder: Path) -> Path:
    # Copies rather than links: a test may write to a file of its run in place, and gpipe appends to metrics.jsonl.
    return Path(shutil.copytree(run, folder / "run", symlinks=True))
