"""Whether a run keeps its model on a disk, and where."""

from __future__ import annotations

from pathlib import Path

from gpipe_cli.config.schema import RunConfig, TrainConfig

__all__ = ["keeps_on_disk", "scratch_folder"]


def keeps_on_disk(settings: RunConfig) -> bool:
    """Whether the engine is one for models that may be larger than memory."""
    return bool(settings.engine.get("to") == "disk")


def scratch_folder(settings: RunConfig) -> Path:
    """Where an engine may keep a file while it runs: on the disk of the run, which need not be there yet."""
    return Path((settings.run_dir if isinstance(settings, TrainConfig) else None) or "runs")
