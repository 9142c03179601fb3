"""The files of a snapshot: read as the state of an engine and the training record, and written from them.

All ranks write at once, each its own tensors, and rank 0 commits them when all files are durable. A single process
writes one file of each kind. Every step that can fail is one of `World.run_together`: either all ranks come to the next
step or all raise, and only the last step gives the directory its name.
"""

from __future__ import annotations

import os
import reprlib
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from gpipe_cli.distributed.world import World
from gpipe_cli.engines.state import EngineState, merged_engine_numbers
from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.runs.snapshots.durable import (
    FileDigest,
    begin_directory,
    commit_directory,
    discard_directory,
    sizes_in,
    write_file,
    write_files,
)
from gpipe_cli.runs.snapshots.manifest import (
    BUFFERS,
    FILES,
    INDEX,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    Manifest,
    VerifiedSnapshot,
    encode,
    encode_index,
    kind_of,
    read_manifest,
    shard_name,
    snapshot_step,
)
from gpipe_cli.runs.snapshots.record import TrainingRecord
from gpipe_cli.tensor_files import tensor_file
from gpipe_cli.tensor_files.tensor_file import BadTensors, TensorFile

NOT_SHARED = (
    "every machine must see the same run directory: put run_dir on a file system that all of them share"
)


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


def write_snapshot(
    path: Path,
    state: EngineState,
    record: TrainingRecord,
    on_chunk: Callable[[], None],
    world: World = World(),  # noqa: B008 - immutable
) -> None:
    """Write the whole snapshot, or nothing and raise; every rank calls it.

    state, record: those of this rank. on_chunk: called before each chunk is written; an exception from it ends the
    writing of this process.
    """
    files = {MODEL: state.model, OPTIMIZER: state.optimizer, BUFFERS: state.buffers}
    files = {
        shard_name(kind, world.rank, world.size): content
        for kind, content in files.items()
        if content or kind == MODEL
    }
    begun = world.run_together(lambda: _begin(path, record, state.nbytes, world))
    record = replace(record, numbers=merged_engine_numbers([rank["numbers"] for rank in begun]))
    try:
        if begun[0]["exists"]:
            # Only a run that was resumed from this very snapshot gets here, to add its evaluation: no tensor changed.
            world.run_together(lambda: replace_record(path, record) if world.is_rank_zero else None)
            return
        written = world.run_together(
            lambda: _write(path, files, state.fetch, on_chunk, is_rank_zero=world.is_rank_zero)
        )
        world.run_together(lambda: _commit(path, record, written) if world.is_rank_zero else None)
    except BaseException:
        if world.is_rank_zero:
            # A rank that still writes there may keep it from being removed; a resumed run removes it then.
            with suppress(OSError):
                discard_directory(path, base=path.parents[1])
        raise


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


def _begin(path: Path, record: TrainingRecord, size: int, world: World) -> dict[str, Any]:
    """Rank 0 makes the directory, unless the snapshot exists.

    No other rank looks for it: a shared file system may go on telling it for a while that there is no such name.
    """
    if not world.is_rank_zero:
        return {"numbers": record.numbers}
    exists = os.path.isdir(path) and not path.is_symlink()  # noqa: PTH112 - False, not an error, without permission
    if not exists:
        try:
            # parents[1] is the run directory: below it nothing may be a link, `snapshots` included.
            begin_directory(path, base=path.parents[1])
        except OSError as error:
            raise _failure(path, error, size) from error
    return {"numbers": record.numbers, "exists": exists}


def _write(
    path: Path,
    files: Mapping[str, dict[str, Tensor]],
    fetch: Callable[[Tensor], Tensor] | None,
    on_chunk: Callable[[], None],
    *,
    is_rank_zero: bool,
) -> dict[str, Any]:
    """Write the files of this rank; for each its digest and its tensors, with their sizes."""
    # Generators: a state with `fetch` reads each tensor when its turn to be written comes.
    contents = {name: tensor_file.encode(content, fetch) for name, content in files.items()}
    try:
        digests = write_files(path, contents, on_chunk, base=path.parents[1])
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not is_rank_zero:
            raise ResourceError(
                f"{path}: rank 0 began this snapshot, but it is not here; {NOT_SHARED}"
            ) from error
        needed = sum(tensor.nbytes for content in files.values() for tensor in content.values())
        raise _failure(path, error, needed) from error
    return {
        name: {**asdict(digests[name]), "tensors": {key: tensor.nbytes for key, tensor in content.items()}}
        for name, content in files.items()
    }


def _commit(path: Path, record: TrainingRecord, written: list[dict[str, Any]]) -> None:
    """Write the indices and the manifest, and give the directory its name."""
    base = path.parents[1]
    shards = {name: shard for of_rank in written for name, shard in of_rank.items()}
    digests = {name: FileDigest(shard["size"], shard["sha256"]) for name, shard in shards.items()}
    try:
        sizes = sizes_in(path, digests, base=base)
        if unseen := [name for name, digest in digests.items() if sizes[name] != digest.size]:
            raise ResourceError(
                f"{path}: rank 0 does not see {unseen[0]} as another rank wrote it; {NOT_SHARED}"
            )
        if len(written) > 1:
            digests |= write_files(path, _indices(shards), lambda: None, base=base)
        # Last, after everything that it lists: a directory without it is no snapshot.
        manifest = encode(Manifest(digests, record.to_json()))
        write_files(path, {MANIFEST: [manifest]}, lambda: None, base=base)
        commit_directory(path, base=base)
    except OSError as error:
        raise _failure(path, error, sum(digest.size for digest in digests.values())) from error


def _indices(shards: Mapping[str, Mapping[str, Any]]) -> dict[str, list[bytes]]:
    indices = {}
    for kind in FILES:
        own = {name: shard["tensors"] for name, shard in shards.items() if kind_of(name) == kind}
        weight_map = {key: name for name, sizes in own.items() for key in sizes}
        assert len(weight_map) == sum(map(len, own.values())), "each tensor has one writer"
        if own:
            total = sum(size for sizes in own.values() for size in sizes.values())
            indices[f"{kind}{INDEX}"] = [encode_index(weight_map, total)]
    return indices


def _failure(path: Path, error: OSError, needed: int) -> ResourceError:
    return ResourceError(
        f"{path}: the snapshot cannot be written: {error}; it needs {needed:,} bytes, {_free_bytes(path)} are free"
    )


def _free_bytes(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free:,}"
    except OSError:
        return "an unknown number"
