"""Find the snapshots of a run and verify them against their manifests.

manifest.json lists the files of a snapshot with size and sha256, the training record and a digest of itself. It is
written last, so a directory without one is not a snapshot. There is no `latest` file that could be wrong: gpipe looks
at the directory each time, and follows no link, `snapshots` itself included.

A single process writes one file of each kind; several ranks write shards with the names that Hugging Face gives them,
with an index for other programs: gpipe reads the tensors' names in the headers of the shards.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import mmap
import os
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from gpipe_cli.distributed.replica_assignment import assign_replicas
from gpipe_cli.errors import ResourceError, RunError
from gpipe_cli.runs.snapshots.durable import CHUNK, UNFINISHED, FileDigest, remove
from gpipe_cli.safe_files import open_directory, open_regular, parse_json, read_regular

if TYPE_CHECKING:  # finding snapshots needs no torch
    from gpipe_cli.distributed.world import World

MODEL, OPTIMIZER, BUFFERS = "model.safetensors", "optimizer.safetensors", "buffers.safetensors"
FILES = (MODEL, OPTIMIZER, BUFFERS)
"""The files of a snapshot that a single process wrote, and the kinds of all others."""
INDEX = ".index.json"
_SHARD = re.compile(r"(model|optimizer|buffers)-(\d{5})-of-(\d{5})(\.safetensors)", flags=re.ASCII)
MANIFEST = "manifest.json"
FORMAT, SHARDED_FORMAT = 1, 2
"""A snapshot in shards has a format of its own, so that a gpipe which cannot read it says so."""
MAX_MANIFEST_BYTES = 64 * 2**20
READERS = 4
"""Files read at once: hashing keeps one core per file busy."""
SNAPSHOTS = "snapshots"
QUARANTINED = ".quarantined"
_NAME = re.compile(r"step-(\d{8,18})", flags=re.ASCII)


def shard_name(kind: str, rank: int, ranks: int) -> str:
    """The name of the file in which a rank writes its tensors of this kind."""
    if ranks == 1:
        return kind
    stem, _, suffix = kind.partition(".")
    return f"{stem}-{rank + 1:05d}-of-{ranks:05d}.{suffix}"


def kind_of(name: str) -> str | None:
    """The kind of a file of tensors; None for any other name, such as that of an index."""
    match = _SHARD.fullmatch(name)
    kind = name if match is None else f"{match[1]}{match[4]}"
    return kind if kind in FILES else None


def is_sharded(names: Collection[str]) -> bool:
    return any(_SHARD.fullmatch(name) for name in names)


def expected_names(names: Collection[str]) -> set[str]:
    """The names that belong together with these shards: all shards of the model, and an index of each kind."""
    shards = {name: match for name in names if (match := _SHARD.fullmatch(name))}
    counts = {int(match[3]) for match in shards.values()}
    if len(counts) != 1 or min(counts) < 2:  # a single writer has no shards
        return set()
    (count,) = counts
    model = {shard_name(MODEL, rank, count) for rank in range(count)}
    others = {name for name, match in shards.items() if 1 <= int(match[2]) <= count}
    kinds = {kind for name in (*model, *others) if (kind := kind_of(name)) is not None}
    return {*model, *others, *(f"{kind}{INDEX}" for kind in kinds)}


def encode_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """Which file holds which tensor, in the form that Hugging Face's libraries read."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return f"{json.dumps(index, indent=2, ensure_ascii=False)}\n".encode()


@final
@dataclass(frozen=True)
class Manifest:
    files: Mapping[str, FileDigest]
    record: Mapping[str, Any]
    """The training record as JSON; see `TrainingRecord`."""


@final
@dataclass(frozen=True)
class VerifiedSnapshot:
    """A snapshot whose files are all as they were written."""

    path: Path
    manifest: Manifest
    contents: dict[str, memoryview]
    """The bytes of the files asked for."""
    names: Collection[str]
    """All files that were verified."""


def encode(manifest: Manifest) -> bytes:
    body = {
        "format": SHARDED_FORMAT if is_sharded(manifest.files) else FORMAT,
        "files": {name: asdict(digest) for name, digest in sorted(manifest.files.items())},
        "record": dict(manifest.record),
    }
    return _json_bytes({**body, "digest": _sha256(body)})


def decode(raw: bytes, path: Path) -> Manifest:
    """Parse a manifest; RunError unless the bytes are exactly those that `encode` writes."""
    try:
        content = parse_json(raw)
    except ValueError as error:
        raise RunError(f"{path}: damaged: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path}: damaged: it is not a manifest")
    digest = content.pop("digest", None)
    if content.get("format") not in (FORMAT, SHARDED_FORMAT):
        raise RunError(
            f"{path}: has the format {reprlib.repr(content.get('format'))}, this gpipe reads {FORMAT} and "
            f"{SHARDED_FORMAT}; use the gpipe that wrote it, or it is damaged"
        )
    # The bytes are compared too: the digest is one of the parsed content, which hides repeated keys and other
    # spellings.
    if digest != _sha256(content) or raw != _json_bytes({**content, "digest": digest}):
        raise RunError(f"{path}: damaged: its digest does not match its content")
    files, record = content.get("files"), content.get("record")
    if not isinstance(files, dict) or not isinstance(record, dict):
        raise RunError(f"{path}: damaged: it lacks its files or its record")
    known = set(FILES) if content["format"] == FORMAT else expected_names(files)
    digests = {name: _parse_file_digest(name, entry, path, known) for name, entry in files.items()}
    if missing := ({MODEL} if content["format"] == FORMAT else known) - digests.keys():
        raise RunError(f"{path}: damaged: it does not list {min(missing)}")
    return Manifest(digests, record)


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        raw = read_regular(path, MAX_MANIFEST_BYTES, base=directory)
    except FileNotFoundError as error:
        raise RunError(f"{directory}: not a snapshot, or an incomplete one: it has no {MANIFEST}") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
    return decode(raw, path)


def read_snapshot(
    directory: Path, wanted: Collection[str] = FILES, ignored: Collection[str] = (), *, verify: bool = True
) -> VerifiedSnapshot:
    """Verify every file except those of ignored kinds, and return the bytes of those of wanted kinds.

    Each file is read once, and the bytes returned are the bytes verified: it could change before a second read.
    verify: False in a rank, which reads no file here: the ranks share that work (`verify_part`).
    """
    manifest = read_manifest(directory)
    names = [name for name in manifest.files if kind_of(name) not in ignored]
    contents = _read_files(directory, manifest, names, wanted) if verify else {}
    return VerifiedSnapshot(directory, manifest, contents, names)


def verify_part(snapshot: VerifiedSnapshot, part: int, parts: int) -> None:
    """Verify the files of one of `parts` processes that share this work; RunError if one of them is damaged."""
    names, files = sorted(snapshot.names), snapshot.manifest.files
    shares = assign_replicas([files[name].size for name in names], parts)
    own = [name for name, share in zip(names, shares, strict=True) if share == part]
    _read_files(snapshot.path, snapshot.manifest, own, wanted=())


def _read_files(
    directory: Path, manifest: Manifest, names: Collection[str], wanted: Collection[str]
) -> dict[str, memoryview]:
    def read(name: str) -> memoryview | None:
        return _read_verified(directory / name, manifest.files[name], keep=kind_of(name) in wanted)

    with ThreadPoolExecutor(READERS, "gpipe-read") as readers:
        contents = zip(names, readers.map(read, names), strict=True)
        return {name: content for name, content in contents if content is not None}


def _read_verified(path: Path, expected: FileDigest, *, keep: bool) -> memoryview | None:
    try:
        with os.fdopen(open_regular(path, base=path.parent), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.size:  # checked before memory of that size is allocated
                raise RunError(f"{path}: damaged: it has {size} bytes instead of {expected.size}")
            # Anonymous memory straight from the system: a bytearray would be zeroed first, which takes as long as
            # reading the file.
            room = size if keep else min(size, CHUNK)
            content = memoryview(mmap.mmap(-1, max(1, room)))[:room]
            digest = _read_and_hash(file, content, size)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise ResourceError(f"{path}: not enough memory for its {expected.size:,} bytes") from error
        raise RunError(f"{path}: damaged or missing: {error}") from error
    if digest != expected.sha256:
        raise RunError(f"{path}: damaged: its sha256 is {digest}, but the manifest says {expected.sha256}")
    return content if keep else None


def _read_and_hash(file: FileIO, content: memoryview, size: int) -> str:
    """Read the file into `content` and hash it; where `content` is shorter than the file, reuse it for each chunk."""
    digest, done = hashlib.sha256(), 0
    reused = len(content) < size
    # Hashing and reading take about equally long: overlap them.
    with ThreadPoolExecutor(1, "gpipe-hash") as hashing:
        while done < size:
            chunk = content[: size - done] if reused else content[done : done + CHUNK]
            count = file.readinto(chunk)
            if not count:  # the file was cut short while we read it: its digest will not match
                break
            hashed = hashing.submit(digest.update, chunk[:count])
            if reused:
                hashed.result()  # the next read overwrites these bytes
            done += count
    return digest.hexdigest()


def _parse_file_digest(name: str, entry: Any, path: Path, known: Collection[str]) -> FileDigest:
    """known: the only names a manifest may list, because a hostile one must not lead anywhere else."""
    match entry:
        case {"size": int(size), "sha256": str(digest)} if size >= 0 and re.fullmatch("[0-9a-f]{64}", digest):
            if name in known:
                return FileDigest(size, digest)
    raise RunError(
        f"{path}: damaged: {reprlib.repr(name)}: {reprlib.repr(entry)} does not describe a file of a snapshot"
    )


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(content, indent=1, ensure_ascii=False)}\n".encode("utf-8", "surrogatepass")


def _sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_json_bytes(body)).hexdigest()


@final
@dataclass(frozen=True)
class SnapshotSearch:
    newest: VerifiedSnapshot | None
    damaged: dict[Path, RunError]
    """Newer snapshots that cannot be used, each with the reason."""


def snapshot_path(run: Path, step: int) -> Path:
    return run / SNAPSHOTS / f"step-{step:08d}"


def snapshot_step(path: Path) -> int | None:
    """The step in the name of a snapshot; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def is_snapshot(path: Path) -> bool:
    return os.path.lexists(path / MANIFEST) or snapshot_step(path) is not None


def run_directory_of(snapshot: Path) -> Path:
    return snapshot.absolute().parents[1]


def snapshot_paths(run: Path) -> list[Path]:
    """Newest first, damaged ones included."""
    paths = [run / SNAPSHOTS / name for name, is_directory in _entries(run).items() if is_directory]
    steps = {path: step for path in paths if (step := snapshot_step(path)) is not None}
    # By number: names with more than eight digits do not sort as text.
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def unfinished_paths(run: Path) -> list[Path]:
    """What a killed process left half-written or half-removed."""
    names = (name for name in _entries(run) if name.endswith(UNFINISHED))
    return [run / SNAPSHOTS / name for name in names if _NAME.fullmatch(name.removesuffix(UNFINISHED))]


def newest_valid_snapshot(
    run: Path, wanted: Collection[str] = FILES, ignored: Collection[str] = (), *, verify: bool = True
) -> SnapshotSearch:
    """wanted, ignored, verify: as for `read_snapshot`."""
    return first_valid_snapshot(snapshot_paths(run), wanted, ignored, verify=verify)


def first_valid_snapshot(
    paths: Iterable[Path],
    wanted: Collection[str] = FILES,
    ignored: Collection[str] = (),
    *,
    verify: bool = True,
) -> SnapshotSearch:
    """wanted, ignored, verify: as for `read_snapshot`."""
    damaged: dict[Path, RunError] = {}
    for path in paths:
        try:
            return SnapshotSearch(read_snapshot(path, wanted, ignored, verify=verify), damaged)
        except RunError as error:
            damaged[path] = error
    return SnapshotSearch(None, damaged)


def rewind_snapshots(run: Path, step: int, used: Path | None) -> list[str]:
    """Set aside every snapshot of `step` or later except the one used, and remove half-written ones.

    Nothing valid is destroyed: the snapshots that the resumed run gives up, and damaged ones, get another name.
    """
    for path in unfinished_paths(run):
        remove(path, run)
    newer = [path for path in snapshot_paths(run) if (snapshot_step(path) or 0) >= step]
    # samefile: the user may have named the snapshot by another path.
    return [_quarantine(path, run) for path in newer if used is None or not path.samefile(used)]


def _quarantine(path: Path, run: Path) -> str:
    with open_directory(path.parent, run) as parent:
        for attempt in itertools.count(1):
            name = f"{path.name}{QUARANTINED}{'' if attempt == 1 else f'-{attempt}'}"
            # rename would silently replace an empty directory, so look for a free name. The run's lock keeps other
            # writers from taking it in between.
            if not os.path.lexists(path.with_name(name)):
                os.rename(path.name, name, src_dir_fd=parent, dst_dir_fd=parent)
                return name
    raise AssertionError("unreachable: the loop above has no end")


def _entries(run: Path) -> dict[str, bool]:
    """The names in the folder of snapshots, each with whether it is a directory; none where there is no folder."""
    try:
        # Listed by descriptor: if the path is a link, or becomes one, this raises instead of following it.
        with open_directory(run / SNAPSHOTS, run) as folder, os.scandir(folder) as entries:
            return {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError(f"{run / SNAPSHOTS}: cannot be read: {error}") from error


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
