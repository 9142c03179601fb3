"""Read what a run left on disk: its configuration, and the snapshot that `run=` or `snapshot=` means.

Everything read here is data from elsewhere: bounded, checked, and never executed. Does without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.hydra_loader import reject_hydra_keys
from gpipe_cli.config.overrides import override_key
from gpipe_cli.config.yaml_files import load_yaml
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.report.formatting import one_line
from gpipe_cli.training.snapshot.manifest import (
    VerifiedSnapshot,
    is_snapshot,
    newest_valid_snapshot,
    read_snapshot,
)


def saved_config(run: Path) -> DictConfig:
    """Read config.yaml of a run directory."""
    path = run / "config.yaml"
    try:
        tree = load_yaml(path, base=run)
    except FileNotFoundError as error:
        raise RunError(f"{run}: not a run directory: it has no config.yaml") from error
    except ConfigError as error:
        raise RunError(str(error)) from error
    if not isinstance(tree, DictConfig):
        raise RunError(f"{path}: not a configuration: its top level must be a mapping of keys")
    reject_hydra_keys(tree, str(path))
    return tree


def with_overrides(
    saved: DictConfig, composed: DictConfig, overrides: Sequence[str], own_keys: Collection[str] = ()
) -> DictConfig:
    """Merge a saved configuration with a composed one: the saved value of every key wins,
    except for the keys in the overrides and `own_keys`.

    An option (`balance=uniform`) replaces the whole group, a dotted key (`balance.layers=[1,2]`) only that key.
    """
    given = [*own_keys, *map(override_key, overrides)]
    # Keep references such as ${oc.env:TOKEN} as text: the result is saved, and must not contain what they resolve to.
    before, now = OmegaConf.to_container(saved), OmegaConf.to_container(composed)
    assert isinstance(before, dict) and isinstance(now, dict)
    result = OmegaConf.create(
        {key: before[key] if key in before and key not in given else now[key] for key in now}
    )
    for path in given:
        if "." in path and path.partition(".")[0] not in given:
            value: Any = now
            for key in path.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            OmegaConf.update(result, path, value, force_add=True)
    return result


def select_snapshot(
    key: str, value: str, wanted: Collection[str], ignored: Collection[str] = ()
) -> VerifiedSnapshot:
    """Read the snapshot that `key=value` names, or the newest valid snapshot of the run that it names.

    `wanted` and `ignored` are as for `read_snapshot`.
    """
    path = Path(value)
    if not path.is_dir():
        raise RunError(f"{key}={value}: no such directory")
    if key != "run" and is_snapshot(path):
        return read_snapshot(path, wanted, ignored)
    if key == "snapshot":
        raise RunError(
            f"snapshot={value}: not a snapshot; give a directory such as runs/.../snapshots/step-00000100"
        )
    snapshots = newest_valid_snapshot(path, wanted, ignored)
    if snapshots.newest is not None:
        warn_of_damaged(snapshots.damaged)
        return snapshots.newest
    if snapshots.damaged:
        reasons = "; ".join(map(str, snapshots.damaged.values()))
        raise RunError(f"{key}={value}: every snapshot in it is damaged: {reasons}")
    raise RunError(f"{key}={value}: contains no snapshot; give the directory of a run that has saved one")


def warn_of_damaged(damaged: Mapping[Path, RunError]) -> None:
    for error in damaged.values():
        sys.stderr.write(f"{one_line(str(error))}; gpipe uses the snapshot before it\n")
