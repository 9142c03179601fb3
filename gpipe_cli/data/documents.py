"""Files of documents, read piece by piece: text files, and rows of JSON lines, parquet and directories of `datasets`.

All reads are bounded, and every error names the file and the row. Nothing is downloaded or run.
"""

from __future__ import annotations

import glob
import importlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, BinaryIO, final

from gpipe_cli.data.token_cache import check_unchanged
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.safe_files import open_regular, parse_json, read_regular

PIECE_BYTES = 2**18
MAX_LINE_BYTES = 2**26
_MAX_STATE_BYTES = 2**24
_ROWS_AT_ONCE = 1000
_ARROW, _PARQUET = ".arrow", ".parquet"
_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""In a directory with the rows of a data set, and in one with a directory for each split."""
_TRAIN, _HELD_OUT = "train", ("validation", "test")
"""Splits; the first that exists of _HELD_OUT is evaluated on."""


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
def _opened(path: Path, digest: str | None) -> Iterator[_HashedFile]:
    """digest: that of the content, which the block must read to its end; None: the content is read only once."""
    with reading(path), os.fdopen(open_regular(path), "rb") as file:
        hashed = _HashedFile(file)
        yield hashed
        if digest is not None:
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
@dataclass(frozen=True)
class DataRow:
    """A line of JSON, or a row of a table."""

    path: Path
    place: str
    """Such as `line 3`."""
    values: Mapping[str, Any]

    def value(self, key: str, name: str) -> Any:
        """The value of the field with this name; key: what chooses it, for the error."""
        if name not in self.values:
            raise self.error(f"has no field '{name}'; set {key} to one of: {_some_names(self.values)}")
        return self.values[name]

    def error(self, problem: str) -> DataError:
        return DataError(f"data.path={self.path}: {self.place}: {problem}")


def find_rows(path: str) -> tuple[list[Path], list[Path]]:
    """The files with the rows of `path`, and those to evaluate on, if it is a directory with a split for that."""
    directory = Path(path)
    if not directory.is_dir():
        return find_files(path), []
    if not (directory / _SPLITS).exists():
        return _saved_files(directory, directory), []
    if not (directory / _TRAIN).is_dir():
        splits = ", ".join(sorted(str(each) for each in directory.iterdir() if each.is_dir()))
        raise DataError(f"data.path={path}: has no split '{_TRAIN}'; give one of: {splits}")
    held_out = next((directory / name for name in _HELD_OUT if (directory / name).is_dir()), None)
    return (
        _saved_files(directory / _TRAIN, directory),
        [] if held_out is None else _saved_files(held_out, directory),
    )


def _saved_files(directory: Path, base: Path) -> list[Path]:
    """The files that `save_to_disk` wrote. Not by `datasets`: it opens whatever path state.json names."""
    name = f"data.path={directory}"
    with reading(directory):
        try:
            state = parse_json(read_regular(directory / _STATE, _MAX_STATE_BYTES, base=base))
            files = [entry["filename"] for entry in state["_data_files"]]
        except FileNotFoundError as error:
            raise DataError(
                f"{name}: has no {_STATE}; give a file, a pattern, or a directory that save_to_disk wrote"
            ) from error
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(f"{name}: {_STATE} is damaged: {error or type(error).__name__}") from error
        for file in files:
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(_ARROW):
                raise DataError(
                    f"{name}: {_STATE} names {file!r}, which is not an {_ARROW} file in this directory"
                )
            os.close(open_regular(directory / file, base=base))
    if not files or state.get("_indices_data_files"):
        raise DataError(f"{name}: has no rows, or only an index of rows; save it again with save_to_disk")
    return [directory / file for file in files]


def rows(path: Path, digest: str | None, fields: Mapping[str, str]) -> Iterator[DataRow]:
    """The rows of a file in order; empty lines are skipped.

    fields: the names of those to read, by the key that chooses them.
    """
    return (
        _table_rows(path, digest, fields) if path.suffix in (_ARROW, _PARQUET) else _json_lines(path, digest)
    )


def _json_lines(path: Path, digest: str | None) -> Iterator[DataRow]:
    number = 0
    with _opened(path, digest) as file:
        while content := file.line(MAX_LINE_BYTES + 1):
            number += 1
            line = DataRow(path, f"line {number}", {})
            if len(content) > MAX_LINE_BYTES:
                raise line.error(f"is longer than {MAX_LINE_BYTES:,} bytes")
            if content.strip():
                yield replace(line, values=_json_object(line, content))


def _json_object(line: DataRow, content: bytes) -> Mapping[str, Any]:
    try:
        value = parse_json(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise line.error(f"is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from error
    except ValueError as error:
        raise line.error(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise line.error(f"is not a JSON object but a {type(value).__name__}")
    return value


def _table_rows(path: Path, digest: str | None, fields: Mapping[str, str]) -> Iterator[DataRow]:
    """The rows of a file of Arrow or parquet, without the features of `datasets`, some of which fetch files."""
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"data.path={path}: needs the package pyarrow; install it: pip install 'gpipe-cli[data]'"
        ) from error
    number = 0
    with reading(path), os.fdopen(open_regular(path), "rb") as file:
        try:
            if path.suffix == _PARQUET:
                table = parquet.ParquetFile(file)
                schema = table.schema_arrow
                batches = table.iter_batches(_ROWS_AT_ONCE, columns=list(fields.values()), use_threads=False)
            else:
                mapped = arrow.py_buffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
                batches = arrow.ipc.open_stream(arrow.BufferReader(mapped))
                schema = batches.schema
            _check_columns(path, schema.names, fields)
            names = _class_names(schema.metadata)
            for batch in batches:
                chosen = batch.select(list(fields.values()))
                chosen.validate(full=True)  # otherwise a damaged file could crash the process
                for begin in range(0, len(chosen), _ROWS_AT_ONCE):
                    for values in chosen.slice(begin, _ROWS_AT_ONCE).to_pylist():
                        number += 1
                        row = DataRow(path, f"row {number}", values)
                        yield replace(row, values=_with_names(row, names))
        except arrow.ArrowException as error:
            raise DataError(f"data.path={path}: is damaged: {' '.join(str(error).split())[:200]}") from error
        if digest is not None:
            file.seek(0)
            check_unchanged(path, file_digest(file, blake2b).hexdigest(), digest)


def _check_columns(path: Path, columns: Sequence[str], fields: Mapping[str, str]) -> None:
    for key, name in fields.items():
        if columns.count(name) != 1:
            raise DataError(
                f"data.path={path}: has no column '{name}'; set {key} to one of: {_some_names(columns)}"
            )


def _class_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, list[str]]:
    """The names of the classes in columns that `datasets` calls a ClassLabel."""
    try:
        features = parse_json((metadata or {})[b"huggingface"])["info"]["features"]
        names = {column: feature.get("names") for column, feature in features.items()}
    except (ValueError, TypeError, LookupError, AttributeError):  # the file has another origin
        return {}
    return {
        column: own
        for column, own in names.items()
        if isinstance(own, list) and all(isinstance(name, str) for name in own)
    }


def _with_names(row: DataRow, names: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    values = dict(row.values)
    for column in names.keys() & values.keys():
        number = values[column]
        if isinstance(number, int) and number >= 0:  # -1: there is no label
            if number >= len(names[column]):
                raise row.error(f"{column}={number}: the column has {len(names[column])} classes")
            values[column] = names[column][number]
    return values


def _some_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:8])[:200]
