"""The engine's state and the training record as a snapshot directory, and back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from torch import Tensor

from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.tensor_files.header import BadTensors
from gpipe_cli.tensor_files.tensor_file import TensorFile
from gpipe_cli.training.snapshot import tensors
from gpipe_cli.training.snapshot.durable import FileDigest, write_directory, write_file
from gpipe_cli.training.snapshot.manifest import (
    BUFFERS,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    Manifest,
    VerifiedSnapshot,
    encode,
    read_manifest,
    snapshot_step,
)
from gpipe_cli.training.snapshot.record import TrainingRecord


@final
@dataclass(frozen=True)
class Snapshot:
    path: Path
    record: TrainingRecord
    state: EngineState


def open_snapshot(verified: VerifiedSnapshot) -> Snapshot:
    """The state and record in verified bytes. Tensors share memory with those bytes."""
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
    """The same for a snapshot that may be larger than memory: its verified files are read again, tensor by tensor."""
    try:
        files = {name: TensorFile(verified.path / name, verified.path) for name in verified.names}
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
    outlines = {name: file.outlines for name, file in files.items()}
    state = replace(
        snapshot.state,
        model=outlines.get(MODEL, {}),
        buffers=outlines.get(BUFFERS, {}),
        optimizer=outlines.get(OPTIMIZER, {}),
        fetch=fetch,
    )
    return replace(snapshot, state=state)


def decode_tensors(verified: VerifiedSnapshot, name: str) -> dict[str, Tensor]:
    """The tensors of one file; none where the snapshot has no such file."""
    if name not in verified.contents:
        return {}
    try:
        return tensors.decode(verified.contents[name])
    except BadTensors as error:
        raise RunError(f"{verified.path / name}: damaged: {error}") from error


def write_snapshot(
    path: Path, state: EngineState, record: TrainingRecord, on_chunk: Callable[[], None]
) -> None:
    """Write the whole snapshot, or nothing and raise ResourceError."""
    files = {MODEL: state.model, OPTIMIZER: state.optimizer, BUFFERS: state.buffers}
    files = {name: content for name, content in files.items() if content or name == MODEL}

    def manifest(digests: dict[str, FileDigest]) -> tuple[str, bytes]:
        return MANIFEST, encode(Manifest(digests, record.to_json()))

    try:
        # Generators: a state with `fetch` reads each tensor when its turn to be written comes.
        contents = {name: tensors.encode(content, state.fetch) for name, content in files.items()}
        # parents[1] is the run directory: below it nothing may be a link, `snapshots` included.
        write_directory(path, contents, manifest, on_chunk, base=path.parents[1])
    except OSError as error:
        needed = sum(tensor.nbytes for content in files.values() for tensor in content.values())
        raise ResourceError(
            f"{path}: the snapshot cannot be written: {error}; it needs {needed:,} bytes, {_free_bytes(path)} are free"
        ) from error


def replace_record(path: Path, record: TrainingRecord) -> None:
    """Replace the record of a snapshot whose tensors stay the same."""
    manifest = replace(read_manifest(path), record=record.to_json())
    try:
        # An atomic replacement, so the snapshot is valid before and after, and at every moment in between.
        write_file(path / MANIFEST, [encode(manifest)], base=path.parents[1])
    except OSError as error:
        raise ResourceError(
            f"{path / MANIFEST}: cannot be written: {error}; {_free_bytes(path)} bytes are free"
        ) from error


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


def check_savable(state: EngineState) -> None:
    """Reject, before the first step, tensors that a snapshot cannot hold."""
    for name, tensor in {**state.model, **state.buffers}.items():
        if reason := tensors.unsupported_reason(tensor):
            raise ConfigError(f"model: '{name}' {reason}, which a snapshot cannot hold")


def _free_bytes(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free:,}"
    except OSError:
        return "an unknown number"
