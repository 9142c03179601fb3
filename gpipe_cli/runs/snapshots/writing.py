"""Write a snapshot: all ranks at once, each its own tensors, committed by rank 0 when all files are durable.

A single process writes one file of each kind. Every step that can fail is one of `World.run_together`: either all ranks
come to the next step or all raise, and only the last step gives the directory its name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gpipe_cli.distributed.world import World
from gpipe_cli.engines.state import EngineState, merged_engine_numbers
from gpipe_cli.errors import ResourceError
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
    encode,
    encode_index,
    kind_of,
    read_manifest,
    shard_name,
)
from gpipe_cli.runs.snapshots.record import TrainingRecord
from gpipe_cli.tensor_files import tensor_file

NOT_SHARED = (
    "every machine must see the same run directory: put run_dir on a file system that all of them share"
)


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
