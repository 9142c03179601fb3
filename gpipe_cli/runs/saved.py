"""A saved run or snapshot that a command names: its configuration, the snapshot to use (the named one, or the best or
last one of a run), and its weights at once or on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from gpipe_cli.config.words import override_key
from gpipe_cli.config.yaml_files import key_path, load_yaml, read_as_current
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.engines.state import EngineState, load_module, nonpersistent_buffers
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.models.weights import fitted_weights, load_weights
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.output import print_status
from gpipe_cli.runs.reader import has_settings
from gpipe_cli.runs.snapshots.contents import decode_tensors, open_large_snapshot, record_of
from gpipe_cli.runs.snapshots.manifest import (
    BUFFERS,
    INDEX,
    MODEL,
    SnapshotSearch,
    VerifiedSnapshot,
    is_sharded,
    is_snapshot,
    read_manifest,
    snapshot_path,
    snapshot_paths,
)
from gpipe_cli.runs.snapshots.record import BestEvaluation, TrainingRecord
from gpipe_cli.sequential.deferred import placeholder, read_from
from gpipe_cli.tensor_files.tensor_file import BadTensors, TensorFile
from gpipe_cli.tensor_files.weights_file import read_weights

BEST, LAST = "best", "last"


def saved_config(run: Path) -> DictConfig:
    """Read config.yaml of a run directory, with the paths that exist now."""
    path = run / "config.yaml"
    try:
        tree = load_yaml(path, base=run)
    except FileNotFoundError as error:
        raise RunError(f"{run}: not a run directory: it has no config.yaml") from error
    except ConfigError as error:
        raise RunError(str(error)) from error
    if not isinstance(tree, DictConfig):
        raise RunError(f"{path}: not a configuration: its top level must be a mapping of keys")
    if "hydra" in tree:
        plain: Any = OmegaConf.to_container(tree)
        raise ConfigError(f"{path}: sets {key_path(plain, 'hydra')}: no file may configure Hydra; remove it")
    read_as_current(tree, run)
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


Search = Callable[[Sequence[Path]], SnapshotSearch]
"""Verifies snapshots until one is valid: `first_valid_snapshot`, or `search_together` in ranks."""


def select_snapshot(key: str, value: str, search: Search, *, warn: bool) -> VerifiedSnapshot:
    """Read the snapshot that `key=value` names, or the newest valid snapshot of the run that it names.

    warn: of damaged snapshots that are newer; one process of a job does so.
    """
    path = Path(value)
    if not path.is_dir():
        raise RunError(f"{key}={value}: no such directory")
    if key != "run" and is_snapshot(path):
        return named_snapshot(path, search)
    if key == "snapshot":
        raise RunError(
            f"snapshot={value}: not a snapshot; give a directory such as runs/.../snapshots/step-00000100"
        )
    snapshots = search(snapshot_paths(path))
    if snapshots.newest is not None:
        if warn:
            warn_of_damaged(snapshots.damaged)
        return snapshots.newest
    if snapshots.damaged:
        reasons = "; ".join(map(str, snapshots.damaged.values()))
        raise RunError(f"{key}={value}: every snapshot in it is damaged: {reasons}")
    hint = "give the directory of a run that has saved one"
    if key == "resume" and has_settings(path):
        hint = f"start the run again with run_dir={value} resume=auto and its other keys"
    raise RunError(f"{key}={value}: contains no snapshot; {hint}")


def named_snapshot(path: Path, search: Search) -> VerifiedSnapshot:
    """The snapshot in this directory; RunError if it is damaged."""
    snapshots = search([path])
    if snapshots.newest is None:
        raise snapshots.damaged[path]
    return snapshots.newest


def warn_of_damaged(damaged: Mapping[Path, RunError]) -> None:
    for error in damaged.values():
        print_status(f"{error}; gpipe uses the snapshot before it")


def weights_file(snapshot: VerifiedSnapshot) -> Path:
    """The file of the weights, or the index of its shards."""
    return snapshot.path / (f"{MODEL}{INDEX}" if is_sharded(snapshot.manifest.files) else MODEL)


def load_into_model(
    model: nn.Module,
    weights: str | None,
    snapshot: VerifiedSnapshot | None,
    referenced: Collection[str] = (),
) -> None:
    """Load the snapshot if there is one, else the file of weights.

    referenced: the parameters that a snapshot may leave out.
    """
    if snapshot is None:
        assert weights is not None, "the configuration was checked"
        file = read_weights(weights, "weights")
        load_weights(model, file, weights, "weights")
        read_from(model, fitted_weights(model, file, weights, "weights"))
        return
    state = EngineState(decode_tensors(snapshot, MODEL), decode_tensors(snapshot, BUFFERS))
    with _errors_name(weights_file(snapshot)):
        load_module(model, state, referenced)
    read_from(model, state.model)


def load_on_demand(
    engine: Engine, model: nn.Module, weights: str | None, snapshot: VerifiedSnapshot | None
) -> None:
    """Load a model that may be larger than memory: the engine reads the tensors that it needs, some at a time."""
    if snapshot is None:
        assert weights is not None, "the configuration was checked"
        engine.load_state(_lazy_state(weights, model))
        return
    with _errors_name(weights_file(snapshot)):
        engine.load_state(open_large_snapshot(snapshot).state)


def _lazy_state(weights: str, model: nn.Module) -> EngineState:
    """The state in a file of weights, read on demand; buffers outside the state_dict keep their values."""
    expected = model.state_dict()
    buffers = nonpersistent_buffers(model, expected)
    if Path(weights).suffix != ".safetensors" or not Path(weights).is_file():
        tensors = fitted_weights(model, read_weights(weights, "weights"), weights, "weights")
        return EngineState(
            {name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()}, buffers
        )
    try:
        file = TensorFile(Path(weights))
    except (BadTensors, OSError) as error:
        raise RunError(f"weights={weights}: damaged, or not a safetensors file ({error})") from error
    fitted = fitted_weights(model, {"": file.outlines}, weights, "weights")
    # An expanded zero has the shape and dtype of the model's parameter but no storage. It stands for the tensor in
    # the file, which may have another dtype, until the engine fetches the slice that contains it.
    placeholders = {
        name: placeholder(outline.shape, expected[name].dtype) for name, outline in fitted.items()
    }
    outlines = {id(placeholder): fitted[name] for name, placeholder in placeholders.items()}

    def fetch(tensor: Tensor) -> Tensor:
        stored = file.fetch(outlines[id(tensor)]) if id(tensor) in outlines else None
        return tensor if stored is None else stored.to(tensor.dtype)

    return EngineState(placeholders, buffers, fetch=fetch)


@contextmanager
def _errors_name(source: Path) -> Iterator[None]:
    try:
        yield
    except RunError as error:
        raise RunError(f"{source}: {error}") from error


@final
@dataclass(frozen=True)
class ChosenSnapshot:
    verified: VerifiedSnapshot
    reason: str
    """A line for the user: which one it is, and why."""


def choose_snapshot(
    key: str, value: str, which: str | None, search: Search, *, warn: bool = True
) -> ChosenSnapshot:
    """Read the snapshot that `key=value` names, or the best or last one of the run that it names.

    which: `best` or `last`; None for the best one if the run knows it, else the last.
    warn: as for `select_snapshot`.
    """
    newest = _newest_record(Path(value), warn=warn) if key == "run" else None
    best = None if newest is None else newest.best
    if which == BEST and newest is not None and best is None:
        raise RunError(
            f"which={BEST}: run={value} has no best snapshot, because it has not been evaluated yet or has "
            f"snapshot.monitor=null; give which={LAST}"
        )
    if newest is None or best is None or which == LAST:
        snapshot = select_snapshot(key, value, search, warn=warn)
        name, known = LAST if key == "run" else key, "" if best is None else f" (best: {_describe(best)})"
        record = record_of(snapshot.path, snapshot.manifest)
        return ChosenSnapshot(snapshot, f"{name}: step {record.position.step}{_average(record)}{known}")
    try:
        snapshot = named_snapshot(snapshot_path(Path(value), best.step), search)
    except RunError as error:
        raise RunError(
            f"run={value}: its best snapshot ({_describe(best)}) cannot be used: {error}; "
            f"give which={LAST} to use the last one"
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
