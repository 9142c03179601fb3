"""The header of a safetensors file: which tensors it holds, and where. Checked whole before anything is made of it.

Does without torch, so that a file can be judged, copied or refused without waiting for it.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from gpipe_cli.safe_files import parse_json

__all__ = ["LARGEST_HEADER", "BadTensors", "Entry", "Header", "read_header"]

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
LARGEST_HEADER = 100 * 2**20
LARGEST_SIZE = 2**62
"""Of all sides of a tensor multiplied, empty ones counted as 1: torch multiplies them too."""
MOST_SIDES = 64


class BadTensors(ValueError):
    """Bytes that are no safetensors file."""


@final
@dataclass(frozen=True)
class Entry:
    """One tensor; `begin` and `end` count from where the data begins."""

    dtype: str
    shape: list[int]
    begin: int
    end: int


@final
@dataclass(frozen=True)
class Header:
    entries: Mapping[str, Entry]
    start: int
    """Where the data begins."""


def read_header(content: bytes | bytearray | memoryview, size: int) -> Header:
    """From the first bytes of a file of that size."""
    if len(content) < 8:
        raise BadTensors("is too short")
    (length,) = struct.unpack_from("<Q", content)
    if length > min(LARGEST_HEADER, size - 8):
        raise BadTensors(f"its header claims {length} bytes")
    try:
        parsed = parse_json(bytes(content[8 : 8 + length]))
    except ValueError as error:
        raise BadTensors(f"its header cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise BadTensors("its header holds no tensors")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(one, str) for one in metadata.values()):
        raise BadTensors("its header has metadata that is no text")
    entries = {name: _entry(name, entry) for name, entry in parsed.items()}
    _check_filled(entries, size - 8 - length)
    return Header(entries, 8 + length)


def _entry(name: str, entry: Any) -> Entry:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            known = dtype in ITEM_SIZES and _is_shape(shape)
            if (
                known
                and _is_unicode(name)
                and begin >= 0
                and math.prod(shape) * ITEM_SIZES[dtype] == end - begin
            ):
                return Entry(dtype, shape, begin, end)
    raise BadTensors(f"its header describes {reprlib.repr(name)} by {reprlib.repr(entry)}")


def _is_unicode(name: str) -> bool:
    """JSON can spell halves of characters, which other readers of the format refuse."""
    return not any("\ud800" <= one <= "\udfff" for one in name)


def _is_shape(sides: list[Any]) -> bool:
    known = len(sides) <= MOST_SIDES and all(type(side) is int and side >= 0 for side in sides)
    return known and math.prod(max(1, side) for side in sides) < LARGEST_SIZE


def _check_filled(entries: Mapping[str, Entry], size: int) -> None:
    """One tensor after another, and nothing else."""
    position = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            raise BadTensors(f"the data of two tensors overlaps, or has a hole, at byte {position}")
        position = entry.end
    if position != size:
        raise BadTensors(f"holds {size} bytes of data, {position} are described")
