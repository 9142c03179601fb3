"""Which snapshot a `run=` or `snapshot=` on the command line means, verified. Does without torch."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpipe_cli.errors import RunError
from gpipe_cli.report.text import plain
from gpipe_cli.training.snapshot.finding import is_snapshot, newest_valid, run_of
from gpipe_cli.training.snapshot.reading import Verified, read_snapshot


@final
@dataclass(frozen=True)
class Chosen:
    run: Path
    snapshot: Verified


def choose(key: str, value: str, wanted: Collection[str], ignored: Collection[str] = ()) -> Chosen:
    """The snapshot itself, or the newest valid one of a run; a damaged one is named on stderr and passed over.

    wanted, ignored: as for `read_snapshot`.
    """
    path = Path(value)
    if not path.is_dir():
        raise RunError(f"{key}={value}: no such directory")
    if key != "run" and is_snapshot(path):
        return Chosen(run_of(path), read_snapshot(path, wanted, ignored))
    if key == "snapshot":
        raise RunError(
            f"snapshot={value}: is no snapshot; give a directory such as runs/.../snapshots/step-00000100"
        )
    found = newest_valid(path, wanted, ignored)
    if found.newest is None:
        raise RunError(_nothing(key, value, found.damaged))
    tell_damaged(found.damaged)
    return Chosen(path, found.newest)


def tell_damaged(damaged: Mapping[Path, RunError]) -> None:
    for error in damaged.values():
        sys.stderr.write(f"{plain(str(error))}; the snapshot before it is taken\n")


def _nothing(key: str, value: str, damaged: Mapping[Path, RunError]) -> str:
    if damaged:
        return f"{key}={value}: every snapshot in it is damaged: {'; '.join(map(str, damaged.values()))}"
    return f"{key}={value}: is no run directory, or its training saved nothing: there is no snapshot in it"
