"""The header of a safetensors file: which tensors it holds, and where. Checked whole before anything uses it.

Imports no torch, so that a file can be checked or copied without waiting for it.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from gpipe_cli.safe_files import parse_json

ITEM_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element, by the format's names of the dtypes that are read."""
MAX_HEADER_BYTES = 100 * 2**20
MAX_ELEMENTS = 2**62
"""Of all dimensions multiplied, empty ones counted as 1: torch computes this product for strides too."""
MAX_DIMENSIONS = 64


@final
class BadTensors(ValueError):
    """The bytes are not a valid safetensors file."""


@final
@dataclass(frozen=True)
class TensorEntry:
    """One tensor; `begin` and `end` count from where the data begins."""

    dtype: str
    shape: list[int]
    begin: int
    end: int


@final
@dataclass(frozen=True)
class TensorHeader:
    entries: Mapping[str, TensorEntry]
    start: int
    """Where the data begins."""
    metadata: Mapping[str, str]


def read_header(content: bytes | bytearray | memoryview, size: int) -> TensorHeader:
    """Parse the header from the first bytes of a file of that size."""
    if len(content) < 8:
        raise BadTensors("it is too short")
    (length,) = struct.unpack_from("<Q", content)
    # The file itself claims this length: bound it before anything of that size is read.
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise BadTensors(f"its header claims {length} bytes")
    try:
        parsed = parse_json(bytes(content[8 : 8 + length]))
    except ValueError as error:
        raise BadTensors(f"its header cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise BadTensors("its header holds no tensors")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadTensors("its header has metadata that is not text")
    entries = {name: _parse_entry(name, entry) for name, entry in parsed.items()}
    _check_contiguous(entries, size - 8 - length)
    return TensorHeader(entries, 8 + length, metadata)


def _parse_entry(name: str, entry: Any) -> TensorEntry:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            # JSON can spell unpaired surrogates, which other readers of the format refuse.
            is_unicode = not any("\ud800" <= character <= "\udfff" for character in name)
            size = math.prod(shape) * ITEM_SIZES[dtype] if dtype in ITEM_SIZES and _is_shape(shape) else None
            if is_unicode and begin >= 0 and size == end - begin:
                return TensorEntry(dtype, shape, begin, end)
    raise BadTensors(f"its header describes {reprlib.repr(name)} by {reprlib.repr(entry)}")


def _is_shape(sizes: list[Any]) -> bool:
    # Not isinstance: a bool is an int in Python, so JSON's `true` would pass for a size.
    valid = len(sizes) <= MAX_DIMENSIONS and all(type(size) is int and size >= 0 for size in sizes)
    return valid and math.prod(max(1, size) for size in sizes) < MAX_ELEMENTS


def _check_contiguous(entries: Mapping[str, TensorEntry], size: int) -> None:
    """The tensors must fill the data without overlaps and gaps: a gap could hide bytes from other readers."""
    position = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            raise BadTensors(f"the data of two tensors overlaps or leaves a gap at byte {position}")
        position = entry.end
    if position != size:
        raise BadTensors(f"it holds {size} bytes of data, but its header describes {position}")
