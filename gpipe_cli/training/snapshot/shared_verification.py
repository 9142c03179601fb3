"""Find the newest valid snapshot as several ranks: each verifies some of its files, and all come to one conclusion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from gpipe_cli.distributed.world import World
from gpipe_cli.errors import RunError
from gpipe_cli.training.snapshot.manifest import SnapshotSearch, read_snapshot, verify_part


def search_together(paths: Sequence[Path], ignored: Collection[str], world: World) -> SnapshotSearch:
    """The first of these snapshots whose files are as they were written; all ranks call it, and get the same answer.

    ignored: as for `read_snapshot`.
    """
    # Those that rank 0 sees: with lists of their own, ranks could verify different snapshots and not know.
    names = world.run_together(lambda: [str(path) for path in paths])[0]
    damaged: dict[Path, RunError] = {}
    for path in map(Path, names):
        reasons = world.run_together(partial(_damage, path, ignored, world))
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            return SnapshotSearch(read_snapshot(path, (), ignored, verify=False), damaged)
        damaged[path] = RunError(reason)
    return SnapshotSearch(None, damaged)


def _damage(path: Path, ignored: Collection[str], world: World) -> str | None:
    """Why this rank's part of the files cannot be used, or None."""
    try:
        verify_part(read_snapshot(path, (), ignored, verify=False), world.rank, world.size)
    except RunError as error:
        return str(error)
    return None
