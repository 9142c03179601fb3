"""Which snapshot a command uses: one that the user names, or the best or the last one of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpipe_cli.errors import RunError
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.output import print_status
from gpipe_cli.run.saved_run import Search, named_snapshot, select_snapshot
from gpipe_cli.training.snapshot.contents import record_of
from gpipe_cli.training.snapshot.manifest import (
    VerifiedSnapshot,
    read_manifest,
    snapshot_path,
    snapshot_paths,
)
from gpipe_cli.training.snapshot.record import BestEvaluation, TrainingRecord

BEST, LAST = "best", "last"
AT = (BEST, LAST)


@final
@dataclass(frozen=True)
class ChosenSnapshot:
    verified: VerifiedSnapshot
    reason: str
    """A line for the user: which one it is, and why."""


def choose_snapshot(
    key: str, value: str, at: str | None, search: Search, *, warn: bool = True
) -> ChosenSnapshot:
    """Read the snapshot that `key=value` names, or the best or last one of the run that it names.

    at: `best` or `last`; None for the best one if the run knows it, else the last.
    warn: as for `select_snapshot`.
    """
    newest = _newest_record(Path(value), warn=warn) if key == "run" else None
    best = None if newest is None else newest.best
    if at == BEST and newest is not None and best is None:
        raise RunError(
            f"at={BEST}: run={value} has no best snapshot, because it has not been evaluated yet or has "
            f"snapshot.monitor=null; give at={LAST}"
        )
    if newest is None or best is None or at == LAST:
        snapshot = select_snapshot(key, value, search, warn=warn)
        name, known = LAST if key == "run" else key, "" if best is None else f" (best: {_describe(best)})"
        record = record_of(snapshot.path, snapshot.manifest)
        return ChosenSnapshot(snapshot, f"{name}: step {record.position.step}{_average(record)}{known}")
    try:
        snapshot = named_snapshot(snapshot_path(Path(value), best.step), search)
    except RunError as error:
        raise RunError(
            f"run={value}: its best snapshot ({_describe(best)}) cannot be used: {error}; "
            f"give at={LAST} to use the last one"
        ) from error
    record = record_of(snapshot.path, snapshot.manifest)
    return ChosenSnapshot(snapshot, f"{BEST}: {_describe(best)} of {newest.position.step}{_average(record)}")


def _newest_record(run: Path, *, warn: bool) -> TrainingRecord | None:
    """The record of the newest snapshot that has a readable one: it knows the best evaluation of the run."""
    damaged = []
    for path in snapshot_paths(run):
        try:
            record = record_of(path, read_manifest(path))
        except RunError as error:
            damaged.append(error)
            continue
        for reason in damaged if warn and record.best is not None else ():
            print_status(f"{reason}; the snapshot before it says which is the best")
        return record
    return None


def _average(record: TrainingRecord) -> str:
    """With `ema`, the weights of a snapshot are averages, and its optimizer says of how many updates."""
    match record.numbers:
        case {"optimizer": {"groups": [{"averaged_updates": int(updates)}, *_]}}:
            return f", weights averaged over {updates} updates (ema)"
    return ""


def _describe(best: BestEvaluation) -> str:
    return f"eval {best.metric} {format_value(best.metric, best.value)} at step {best.step}"
