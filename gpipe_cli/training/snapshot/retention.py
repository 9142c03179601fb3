"""Which snapshots a run keeps, and whether the disk has room for them: checked before the first step."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpipe_cli.errors import ResourceError
from gpipe_cli.training.loop import TrainSpec
from gpipe_cli.training.snapshot.discovery import snapshot_paths
from gpipe_cli.values import format_bytes

LOWER_IS_BETTER = ("loss", "error", "bits_per_token", "perplexity")
"""A metric whose name ends like this is best when it is smallest; any other when it is largest."""


@final
@dataclass(frozen=True)
class Retention:
    every: int | None
    """Steps between two snapshots; None: one per epoch."""
    keep: int
    """How many of the newest snapshots to keep."""
    monitor: str | None
    """The metric whose best evaluation is kept as well."""

    def max_snapshots(self, spec: TrainSpec) -> int:
        """How many snapshots the disk holds at most: those kept, the best one, and the one being written."""
        saves = spec.epochs if self.every is None else -(-spec.steps // self.every)
        if self.every is not None and self.monitor is not None:
            saves += spec.epochs  # every evaluation may be the best one yet
        return min(saves, self.keep + (self.monitor is not None) + 1)

    def is_better(self, value: float, best: float) -> bool:
        assert self.monitor is not None, "there is a metric to compare"
        return value < best if self.monitor.endswith(LOWER_IS_BETTER) else value > best


def check_snapshot_space(run: Path, spec: TrainSpec, retention: Retention, size: int) -> str | None:
    """Raise if the disk has no room for one snapshot of `size` bytes; return a warning if not all will fit.

    run: the run directory, which need not exist yet.
    """
    try:
        existing = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
    except OSError:  # a file system that does not report its free space: the first write will show
        return None
    planned = retention.max_snapshots(spec) - len(snapshot_paths(run))
    if planned > 0 and free < size:
        raise ResourceError(
            f"{run}: no room for a snapshot: it needs about {size:,} bytes, {free:,} are free; "
            "make room, or choose a run_dir on another disk"
        )
    if free < planned * size:
        return (
            f"warning: {run}: the run will keep {planned} snapshots of about {format_bytes(size)}, but only "
            f"{free // size} fit into the {format_bytes(free)} that are free; make room, or lower "
            f"snapshot.keep={retention.keep}"
        )
    return None
