"""Files of documents, read piece by piece: text files, and files with a JSON object per line.

All reads are bounded, and every error names the file and the line.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, final

from gpipe_cli.data.token_cache import check_unchanged
from gpipe_cli.errors import DataError
from gpipe_cli.safe_files import open_regular, parse_json

PIECE_BYTES = 2**18
MAX_LINE_BYTES = 2**26


def find_files(path: str) -> list[Path]:
    """The file of that name, or those that match the pattern, in alphabetical order."""
    if os.path.lexists(path) or not glob.has_magic(path):
        return [Path(path)]
    matches = [Path(match) for match in glob.iglob(path, recursive=True)]  # noqa: PTH207 - takes absolute patterns too
    if files := sorted(match for match in matches if not match.is_dir()):
        return files
    raise DataError(f"data.path={path}: no file matches")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Report that a file cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"data.path={path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # the name contains a null byte
        raise DataError(f"data.path={path}: cannot be read: {error}") from error


@final
class _HashedFile:
    """A file that is read from start to end, with the digest of what was read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, blake2b()

    def read(self, size: int) -> bytes:
        return self._hashed(self._file.read(size))

    def line(self, most: int) -> bytes:
        return self._hashed(self._file.readline(most))

    def digest(self) -> str:
        return self._digest.hexdigest()

    def _hashed(self, content: bytes) -> bytes:
        self._digest.update(content)
        return content


@contextmanager
def _opened(path: Path, digest: str) -> Iterator[_HashedFile]:
    """digest: that of the content, which the block must read to its end."""
    with reading(path), os.fdopen(open_regular(path), "rb") as file:
        hashed = _HashedFile(file)
        yield hashed
        check_unchanged(path, hashed.digest(), digest)


@final
@dataclass(frozen=True)
class TextPiece:
    content: bytes
    ends_document: bool


def text_file(path: Path, digest: str) -> Iterator[TextPiece]:
    """A file that is one document."""
    with _opened(path, digest) as file:
        yield from document_pieces(file.read)


def document_pieces(read: Callable[[int], bytes]) -> Iterator[TextPiece]:
    """A document in pieces of about 256 KiB. They end with a line, or else with a word, or else with a character."""
    rest = b""
    while block := read(PIECE_BYTES):
        text = rest + block
        cut = _cut(text)
        rest = text[cut:]
        yield TextPiece(text[:cut], ends_document=False)
    yield TextPiece(rest, ends_document=True)


def _cut(text: bytes) -> int:
    if len(text) < PIECE_BYTES:
        return 0
    if end := text.rfind(b"\n") + 1 or max(text.rfind(b" "), 0):
        return end
    # In UTF-8 every byte of a character but the first is 10xxxxxx, and a character has at most four.
    starts = (
        place for place in range(len(text) - 1, max(len(text) - 5, 0), -1) if text[place] & 0xC0 != 0x80
    )
    return next(starts, len(text))


@final
class Line:
    """A line of a file, for errors."""

    def __init__(self, path: Path, number: int) -> None:
        self._path, self._number = path, number

    def error(self, problem: str) -> DataError:
        return DataError(f"data.path={self._path}: line {self._number}: {problem}")


def json_lines(path: Path, digest: str, field: str) -> Iterator[tuple[Line, Any]]:
    """The value of `field` in the object on each line; empty lines are skipped."""
    number = 0
    with _opened(path, digest) as file:
        while content := file.line(MAX_LINE_BYTES + 1):
            number += 1
            line = Line(path, number)
            if len(content) > MAX_LINE_BYTES:
                raise line.error(f"is longer than {MAX_LINE_BYTES:,} bytes")
            if content.strip():
                yield line, _field(line, content, field)


def _field(line: Line, content: bytes, field: str) -> Any:
    try:
        value = parse_json(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise line.error(f"is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from error
    except ValueError as error:
        raise line.error(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise line.error(f"is not a JSON object but a {type(value).__name__}")
    if field not in value:
        names = ", ".join(sorted(value)[:8])[:200]
        raise line.error(f"has no field '{field}'; set data.field to one of: {names}")
    return value[field]
