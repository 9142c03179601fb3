"""Verify a snapshot, then hand out the very bytes that were verified.

Each file is read once: between a check and a second look somebody could change it. Knows nothing of tensors.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import final

from gpipe_cli.errors import ResourceError, RunError
from gpipe_cli.safe_files import open_regular
from gpipe_cli.training.snapshot.durable import CHUNK, FileFacts
from gpipe_cli.training.snapshot.manifest import FILES, Manifest, read_manifest


@final
@dataclass(frozen=True)
class Verified:
    """A snapshot of which every file is as it was written."""

    path: Path
    manifest: Manifest
    contents: dict[str, memoryview]
    """The files asked for."""
    names: Collection[str]
    """Of all files that were verified."""


def read_snapshot(
    directory: Path, wanted: Collection[str] = FILES, ignored: Collection[str] = ()
) -> Verified:
    """Verify every file but those ignored; keep what is wanted. RunError names the first that is damaged."""
    manifest = read_manifest(directory)
    names = [name for name in manifest.files if name not in ignored]

    def content_of(name: str) -> memoryview | None:
        return _verified(directory / name, manifest.files[name], keep=name in wanted)

    with ThreadPoolExecutor(len(FILES), "gpipe-read") as reading:  # hashing keeps a core busy for each file
        contents = dict(zip(names, reading.map(content_of, names), strict=True))
    return Verified(
        directory, manifest, {name: one for name, one in contents.items() if one is not None}, names
    )


def verify(directory: Path) -> Manifest:
    return read_snapshot(directory, wanted=()).manifest


def _verified(path: Path, facts: FileFacts, *, keep: bool) -> memoryview | None:
    try:
        with os.fdopen(open_regular(path, base=path.parent), "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            if found != facts.size:  # before anything of that size is allocated
                raise RunError(f"{path}: damaged: has {found} bytes instead of {facts.size}")
            content = _memory(facts.size if keep else min(facts.size, CHUNK))
            digest = _digest(file, content, facts.size)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise ResourceError(f"{path}: no memory for its {facts.size:,} bytes") from error
        raise RunError(f"{path}: damaged, or not there: {error}") from error
    if digest != facts.sha256:
        raise RunError(f"{path}: damaged: its sha256 is {digest}, {facts.sha256} was written")
    return content if keep else None


def _memory(size: int) -> memoryview:
    """Straight from the system: a bytearray would be filled with zeros first, which takes as long as reading."""
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]


def _digest(file: FileIO, content: memoryview, size: int) -> str:
    """Hash the file while reading it into `content`, over and over from its start where that is shorter."""
    digest, done = hashlib.sha256(), 0
    reused = len(content) < size
    with ThreadPoolExecutor(1, "gpipe-hash") as hashing:
        while done < size:
            place = content[: size - done] if reused else content[done : done + CHUNK]
            count = file.readinto(place)
            if not count:  # cut short meanwhile: the digest will tell
                break
            hashed = hashing.submit(digest.update, place[:count])
            if reused:
                hashed.result()
            done += count
    return digest.hexdigest()
