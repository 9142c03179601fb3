"""A snapshot as training sees it: the engine's state and the record, to and from files.

Decides which tensors go to which file, and what is said when they cannot be written or do not fit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from torch import Tensor

from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.training.snapshot import tensors
from gpipe_cli.training.snapshot.durable import FileFacts, write_directory, write_file
from gpipe_cli.training.snapshot.finding import named_step
from gpipe_cli.training.snapshot.manifest import (
    BUFFERS,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    Manifest,
    encode,
    read_manifest,
)
from gpipe_cli.training.snapshot.reading import Verified
from gpipe_cli.training.snapshot.record import Record


@final
@dataclass(frozen=True)
class Snapshot:
    path: Path
    record: Record
    state: EngineState


def open_snapshot(verified: Verified) -> Snapshot:
    """What verified bytes mean."""
    try:
        record = Record.from_json(verified.manifest.record)
        if named_step(verified.path) not in (None, record.position.step):
            raise RunError(f"damaged: it is of step {record.position.step}, another one than its directory")
    except RunError as error:
        raise RunError(f"{verified.path / MANIFEST}: {error}") from error
    state = EngineState(
        model=tensors_of(verified, MODEL),
        buffers=tensors_of(verified, BUFFERS),
        optimizer=tensors_of(verified, OPTIMIZER),
        numbers=dict(record.numbers),
    )
    return Snapshot(verified.path, record, state)


def open_large_snapshot(verified: Verified) -> Snapshot:
    """The same for one that may be larger than memory: it has been verified, and is read again, tensor by tensor."""
    try:
        files = {name: tensors.TensorFile(verified.path / name, verified.path) for name in verified.names}
    except (tensors.BadTensors, OSError) as error:
        raise RunError(f"{verified.path}: damaged: {error}") from error

    def fetch(outline: Tensor) -> Tensor:
        try:
            found = (file.fetch(outline) for file in files.values())
            return next((one for one in found if one is not None), outline)
        except (tensors.BadTensors, OSError) as error:
            raise RunError(f"{verified.path}: damaged meanwhile: {error}") from error

    whole = open_snapshot(replace(verified, contents={}))
    outlines = {name: file.outlines for name, file in files.items()}
    state = replace(
        whole.state,
        model=outlines.get(MODEL, {}),
        buffers=outlines.get(BUFFERS, {}),
        optimizer=outlines.get(OPTIMIZER, {}),
        fetch=fetch,
    )
    return replace(whole, state=state)


def tensors_of(verified: Verified, name: str) -> dict[str, Tensor]:
    """The tensors of one file; none where the snapshot has no such file."""
    if name not in verified.contents:
        return {}
    try:
        return tensors.decode(verified.contents[name])
    except tensors.BadTensors as error:
        raise RunError(f"{verified.path / name}: damaged: {error}") from error


def write_snapshot(path: Path, state: EngineState, record: Record, between: Callable[[], None]) -> None:
    """All of it, or a ResourceError and nothing."""
    files = _files(state)

    def manifest(facts: dict[str, FileFacts]) -> tuple[str, bytes]:
        return MANIFEST, encode(Manifest(facts, record.to_json()))

    try:
        contents = {name: tensors.encode(one, state.fetch) for name, one in files.items()}
        write_directory(path, contents, manifest, between, base=path.parents[1])
    except OSError as error:
        needed = sum(map(tensors.size, files.values()))
        raise ResourceError(
            f"{path}: the snapshot cannot be written: {error}; it needs {needed:,} bytes, {_free(path)} are free"
        ) from error


def amend(path: Path, record: Record) -> None:
    """Change what a snapshot says about a state whose tensors are the same."""
    manifest = replace(read_manifest(path), record=record.to_json())
    try:
        write_file(path / MANIFEST, [encode(manifest)], base=path.parents[1])
    except OSError as error:
        raise ResourceError(
            f"{path / MANIFEST}: cannot be written: {error}; {_free(path)} bytes are free"
        ) from error


def copied(state: EngineState, spare: EngineState | None = None) -> EngineState:
    """A state that further steps do not change, in the memory of the CPU; where `spare` has room, in its memory."""
    assert state.fetch is None, "what may be larger than memory is not copied"
    room = EngineState({}) if spare is None else spare
    return replace(
        state,
        model=_copied(state.model, room.model),
        buffers=_copied(state.buffers, room.buffers),
        optimizer=_copied(state.optimizer, room.optimizer),
    )


def check_savable(state: EngineState) -> None:
    """Complain at the start of what could not be written later."""
    for name, tensor in {**state.model, **state.buffers}.items():
        if reason := tensors.problem(tensor):
            raise ConfigError(f"model: '{name}' {reason}, which a snapshot cannot hold")


def _files(state: EngineState) -> dict[str, dict[str, Tensor]]:
    files = {MODEL: state.model, OPTIMIZER: state.optimizer, BUFFERS: state.buffers}
    return {name: content for name, content in files.items() if content or name == MODEL}


def _copied(tensors: dict[str, Tensor], room: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: _copy(tensor.detach(), room.get(name)) for name, tensor in tensors.items()}


def _copy(tensor: Tensor, room: Tensor | None) -> Tensor:
    """Memory that was in use before costs an eighth of new memory, which the system has to clear first."""
    if room is not None and room.shape == tensor.shape and room.dtype == tensor.dtype:
        return room.copy_(tensor)
    return tensor.to("cpu", copy=True).contiguous()


def _free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free:,}"
    except OSError:
        return "unknown how many"
