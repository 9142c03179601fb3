"""Whether the disk has room for the snapshots a run will write, told before its first step.

Decides how many will lie there at once and what is said when they do not fit. What one of them holds is told by
whoever knows the model and its optimizer.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from gpipe_cli.byte_size import byte_text
from gpipe_cli.errors import ResourceError
from gpipe_cli.training.loop import Plan
from gpipe_cli.training.snapshot.finding import snapshot_paths
from gpipe_cli.training.snapshot.keeper import Retention


def check_space(run: Path, plan: Plan, retention: Retention, size: int) -> str | None:
    """Refuse a disk without room for one snapshot of that many bytes; a warning where not all will fit.

    run: its directory, which need not be there yet.
    """
    try:
        place = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free
    except OSError:  # a file system that does not say; writing will tell
        return None
    wanted = most_at_once(plan, retention) - len(snapshot_paths(run))
    if wanted > 0 and free < size:
        raise ResourceError(
            f"{run}: no room for a snapshot: it needs about {size:,} bytes, {free:,} are free; "
            "make room, or choose a run_dir on another disk"
        )
    if free < wanted * size:
        return (
            f"warning: {run}: {wanted} snapshots of about {byte_text(size)} are planned, and {free // size} fit into "
            f"the {byte_text(free)} that are free; make room, or lower snapshot.keep={retention.keep}"
        )
    return None


def most_at_once(plan: Plan, retention: Retention) -> int:
    """How many snapshots lie on the disk when there are most: those kept, the best, and one being written."""
    saves = plan.epochs if retention.every is None else -(-plan.steps // retention.every)
    if retention.every is not None and retention.monitor is not None:
        saves += plan.epochs  # each evaluation may be the best so far
    return min(saves, retention.keep + (retention.monitor is not None) + 1)
