"""A snapshot directory as the state of an engine and the training record; copies of a state."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from torch import Tensor, nn

from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.runs.snapshots.manifest import (
    BUFFERS,
    FILES,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    Manifest,
    VerifiedSnapshot,
    kind_of,
    snapshot_step,
)
from gpipe_cli.runs.snapshots.record import TrainingRecord
from gpipe_cli.tensor_files import tensor_file
from gpipe_cli.tensor_files.tensor_file import BadTensors, TensorFile


@final
@dataclass(frozen=True)
class Snapshot:
    path: Path
    record: TrainingRecord
    state: EngineState


def open_snapshot(verified: VerifiedSnapshot) -> Snapshot:
    """Read the state and the record from verified bytes, with which the tensors share memory."""
    record = record_of(verified.path, verified.manifest)
    state = EngineState(
        model=decode_tensors(verified, MODEL),
        buffers=decode_tensors(verified, BUFFERS),
        optimizer=decode_tensors(verified, OPTIMIZER),
        numbers=dict(record.numbers),
    )
    return Snapshot(verified.path, record, state)


def record_of(path: Path, manifest: Manifest) -> TrainingRecord:
    """The record of the snapshot at `path`; RunError if it cannot be used."""
    try:
        record = TrainingRecord.from_json(manifest.record)
        # A directory that was renamed must not resume a run at another step than its name says.
        if snapshot_step(path) not in (None, record.position.step):
            raise RunError(f"damaged: it belongs to step {record.position.step}, unlike its directory")
    except RunError as error:
        raise RunError(f"{path / MANIFEST}: {error}") from error
    return record


def open_large_snapshot(verified: VerifiedSnapshot) -> Snapshot:
    """Open a snapshot that may be larger than memory: its verified files are read again, tensor by tensor."""
    try:
        files = {
            name: TensorFile(verified.path / name, verified.path) for name in verified.names if kind_of(name)
        }
    except (BadTensors, OSError) as error:
        raise RunError(f"{verified.path}: damaged: {error}") from error

    def fetch(outline: Tensor) -> Tensor:
        try:
            for file in files.values():
                if (tensor := file.fetch(outline)) is not None:
                    return tensor
        except (BadTensors, OSError) as error:
            raise RunError(f"{verified.path}: damaged since it was verified: {error}") from error
        return outline

    # Without contents this only parses and checks the record; the tensors stay on disk.
    snapshot = open_snapshot(replace(verified, contents={}))
    outlines = {
        kind: _merged(
            verified.path, {name: file.outlines for name, file in files.items() if kind_of(name) == kind}
        )
        for kind in FILES
    }
    state = replace(
        snapshot.state,
        model=outlines[MODEL],
        buffers=outlines[BUFFERS],
        optimizer=outlines[OPTIMIZER],
        fetch=fetch,
    )
    return replace(snapshot, state=state)


def decode_tensors(verified: VerifiedSnapshot, kind: str) -> dict[str, Tensor]:
    """The tensors of one kind; none where the snapshot has no such file."""
    shards = {}
    for name, content in verified.contents.items():
        if kind_of(name) == kind:
            try:
                shards[name] = tensor_file.decode(content)
            except BadTensors as error:
                raise RunError(f"{verified.path / name}: damaged: {error}") from error
    return _merged(verified.path, shards)


def _merged(path: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all shards, by the names of the files."""
    merged: dict[str, Tensor] = {}
    for name, shard in shards.items():
        if repeated := merged.keys() & shard.keys():
            raise RunError(f"{path / name}: damaged: another shard has {reprlib.repr(min(repeated))} as well")
        merged |= shard
    return merged


def copy_state(state: EngineState, reuse: EngineState | None = None) -> EngineState:
    """Copy a state to CPU memory, so that further steps do not change it; where possible into the memory of `reuse`."""
    assert state.fetch is None, "a state that may be larger than memory is not copied"
    target = EngineState({}) if reuse is None else reuse
    return replace(
        state,
        model=_copy_tensors(state.model, target.model),
        buffers=_copy_tensors(state.buffers, target.buffers),
        optimizer=_copy_tensors(state.optimizer, target.optimizer),
    )


def _copy_tensors(source: dict[str, Tensor], target: dict[str, Tensor]) -> dict[str, Tensor]:
    # Both kinds of copy block, so the next step may change the source as soon as this returns.
    copies = {}
    for name, tensor in source.items():
        before = target.get(name)
        if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
            # Copying into memory that is mapped already takes an eighth of the time: the system clears new pages first.
            copies[name] = before.copy_(tensor.detach())
        else:
            copies[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return copies


def copy_buffers(state: EngineState, module: nn.Module) -> EngineState:
    """The state with copies of the buffers, which forward changes; only an update changes the other tensors."""
    names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    changing = {name: tensor for name, tensor in state.model.items() if name in names}
    return replace(
        state, model={**state.model, **_copy_tensors(changing, {})}, buffers=_copy_tensors(state.buffers, {})
    )


def check_savable(state: EngineState) -> None:
    """Reject, before the first step, tensors that a snapshot cannot hold."""
    for name, tensor in {**state.model, **state.buffers}.items():
        if reason := tensor_file.unsupported_reason(tensor):
            raise ConfigError(f"model: '{name}' {reason}, which a snapshot cannot hold")
