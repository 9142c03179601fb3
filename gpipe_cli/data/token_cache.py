"""Tokens on disk, made once and memory-mapped from then on, so that a text may be larger than memory.

    cache = TokenCache(folder)
    stored = cache.get(settings, lambda: pieces)       # `pieces` only if nothing is stored for these settings

The name of an entry is a digest of everything its tokens depend on. An entry is written under another name and renamed
when it is complete. A lock lets one process write while others, such as the ranks of the same run, wait for the result.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self, final

import torch
from torch import Tensor

from gpipe_cli.errors import DataError, ResourceError
from gpipe_cli.safe_files import open_regular, parse_json, read_regular

TOKENS, DOCUMENTS, INDEX = "tokens.int32", "documents.int64", "index.json"
NEVER = 2**62
"""The position of the first scored token of a document that has none."""
_MAX_INDEX_BYTES = 2**26
_SETTLED_NS = 2 * 10**9
"""A file that changed this shortly before it was read may change again without a new time stamp."""


@final
@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a document."""

    tokens: array[int]
    """A token that is not scored is stored as its complement, ~token, which is negative."""
    ends_document: bool
    label: str | None = None
    """The class of the document, where documents have one."""
    is_held_out: bool = False
    """Whether it is of a file to evaluate on; such files come last."""


@final
@dataclass(frozen=True)
class StoredTokens:
    tokens: Tensor
    """int32, memory-mapped: all documents, one after the other."""
    documents: Tensor
    """int64 [documents, 2], memory-mapped: where a document ends, and the position in it of the first token that is
    scored and has another one before it. Where documents have classes, the second number is that of the class."""
    labels: tuple[str, ...] = ()
    """The names of the classes, in the order in which they first occur."""
    trained: int | None = None
    """How many documents precede those of files to evaluate on; None if there are no such files."""


@final
class TokenCache:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def digest_of(self, path: Path) -> str:
        """The digest of a file's content. It is not read again while its size and times stay the same."""
        memo = self._folder / f"{_digest(str(path.absolute()))}.source.json"
        descriptor = open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
            match _read_json(memo):
                case {"stamp": known, "digest": str(digest)} if known == stamp:
                    return digest
            self._check_room(path, status.st_size)
            settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS
            digest = file_digest(file, blake2b).hexdigest()
        if settled:
            try:
                temporary = memo.with_name(f"{memo.name}.{os.getpid()}.new")
                temporary.write_text(json.dumps({"stamp": stamp, "digest": digest}), encoding="utf-8")
                temporary.replace(memo)
            except OSError as error:
                raise self._unwritable(error) from error
        return digest

    def _check_room(self, path: Path, size: int) -> None:
        """Raise before a long wait for something that cannot end well: tokens take about as much room as the text."""
        free = shutil.disk_usage(self._folder).free
        if size > free:
            raise ResourceError(
                f"data.path={path}: has {size:,} bytes, and its tokens need about as many, but {self._folder} has "
                f"{free:,} left; give another folder with data.cache=FOLDER"
            )

    def get(self, settings: Mapping[str, Any], pieces: Callable[[], Iterable[Piece]]) -> StoredTokens:
        """The tokens for these settings; those of `pieces` if none are stored or if they are damaged."""
        entry = self._folder / _digest(json.dumps(settings, sort_keys=True))
        stored = _load(entry)
        if stored is not None:
            return stored
        with self._lock(entry) as locked:
            stored = _load(entry)
            if stored is None:
                self._make(entry, pieces(), alone=locked)
                stored = _load(entry)
        if stored is None:
            raise ResourceError(f"{entry}: cannot be read back; give another folder with data.cache=FOLDER")
        return stored

    def _make(self, entry: Path, pieces: Iterable[Piece], *, alone: bool) -> None:
        """alone: whether no other process makes the same entry."""
        try:
            if alone:
                for left_behind in self._folder.glob(f"{entry.name}.tmp*"):
                    shutil.rmtree(left_behind)
            temporary = Path(mkdtemp(prefix=f"{entry.name}.tmp", dir=self._folder))
            try:
                _write_entry(temporary, pieces)
                shutil.rmtree(entry, ignore_errors=True)  # it is damaged
                temporary.rename(entry)
            except OSError:
                if not entry.exists():  # otherwise another process was faster
                    raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        except OSError as error:
            raise self._unwritable(error) from error

    @contextmanager
    def _lock(self, entry: Path) -> Iterator[bool]:
        """Yields False where the file system has no locks: then two processes may do the same work."""
        try:
            file = entry.with_name(f"{entry.name}.lock").open("ab")
        except OSError as error:
            raise self._unwritable(error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                locked = True
            except OSError:
                locked = False
            yield locked

    def _unwritable(self, error: OSError) -> ResourceError:
        return ResourceError(
            f"data.cache={self._folder}: cannot be written: {error.strerror or error}; "
            "make room, or give another folder with data.cache=FOLDER"
        )


def _write_entry(folder: Path, pieces: Iterable[Piece]) -> None:
    with _NewFile(folder / TOKENS) as tokens, _NewFile(folder / DOCUMENTS) as documents:
        end = length = 0
        first = NEVER
        labels: dict[str, int] = {}
        trained, count = None, 0
        for piece in pieces:
            if first == NEVER:
                first = _first_scored(piece.tokens, length)
            length += len(piece.tokens)
            tokens.write(piece.tokens.tobytes())
            if piece.ends_document:
                end += length
                if piece.label is not None:
                    first = labels.setdefault(piece.label, len(labels))
                documents.write(struct.pack("=qq", end, first))
                trained = count if piece.is_held_out and trained is None else trained
                count += 1
                length, first = 0, NEVER
        assert length == 0, "every document ends"
        files = {TOKENS: tokens.complete(), DOCUMENTS: documents.complete()}
        facts = {**files, "labels": list(labels), "trained": trained}
    with _NewFile(folder / INDEX) as index:
        index.write(json.dumps(facts).encode())
        index.complete()


def _first_scored(tokens: array[int], before: int) -> int:
    """before: how many tokens of the document precede these; its very first token is predicted from nothing."""
    return next(
        (before + place for place, token in enumerate(tokens) if token >= 0 and before + place), NEVER
    )


@final
class _NewFile:
    """A file to write from start to end."""

    def __init__(self, path: Path) -> None:
        self._file, self._digest = path.open("xb"), blake2b()

    def write(self, content: bytes) -> None:
        self._digest.update(content)
        self._file.write(content)

    def complete(self) -> dict[str, Any]:
        """Return what tells the file from a damaged one, once the disk has all of it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        status = os.fstat(self._file.fileno())
        return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "digest": self._digest.hexdigest()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _load(entry: Path) -> StoredTokens | None:
    """The entry, or None if it does not exist or is damaged."""
    match _read_json(entry / INDEX):
        case {"tokens.int32": dict(tokens), "documents.int64": dict(documents)} as facts:
            if _is_intact(entry / TOKENS, tokens) and _is_intact(entry / DOCUMENTS, documents):
                return StoredTokens(
                    _mapped(entry / TOKENS, torch.int32),
                    _mapped(entry / DOCUMENTS, torch.int64).view(-1, 2),
                    tuple(facts.get("labels", ())),
                    facts.get("trained"),
                )
    return None


def _is_intact(path: Path, facts: Mapping[str, Any]) -> bool:
    """Reads the file only if somebody touched it since it was written."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size != facts.get("size") or not status.st_size:
                return False
            unchanged = status.st_mtime_ns == facts.get("mtime_ns")
            return unchanged or file_digest(file, blake2b).hexdigest() == facts.get("digest")
    except OSError:
        return False


def _mapped(path: Path, dtype: torch.dtype) -> Tensor:
    # Private: nobody can write the file through the tensor.
    return torch.from_file(str(path), shared=False, size=path.stat().st_size // dtype.itemsize, dtype=dtype)


def _read_json(path: Path) -> Any:
    """The content of a file of the cache; None if it is missing or damaged, which makes the cache start over."""
    try:
        return parse_json(read_regular(path, _MAX_INDEX_BYTES))
    except (OSError, ValueError):
        return None


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def check_unchanged(path: Path, digest: str, expected: str) -> None:
    """Raise if a file changed between the two times it was read."""
    if digest != expected:
        raise DataError(f"data.path={path}: changed while gpipe read it; start again when it is complete")
