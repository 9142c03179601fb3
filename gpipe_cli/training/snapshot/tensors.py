"""Tensors by name as the bytes of a safetensors file, and back.

The format is public (a length, a JSON header, raw little-endian data), any reader of it reads these files. Written
here so that equal tensors give equal bytes, that data streams to the disk without a copy of the whole, and that
what was verified in memory is used in place. A header is checked whole before a tensor is made from it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100 * 2**20
LARGEST_SIDE = 2**40


class BadTensors(ValueError):
    """Bytes that are no safetensors file."""


def problem(tensor: Any) -> str | None:
    """Why a value cannot be written, or None."""
    if not isinstance(tensor, Tensor):
        return f"is a {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"is a {tensor.layout} tensor" if not tensor.is_quantized else "is quantized"
    if tensor.dtype not in NAMES:
        return f"has the dtype {tensor.dtype}"
    return None


def encode(
    tensors: Mapping[str, Tensor], fetch: Callable[[Tensor], Tensor] | None = None
) -> Iterator[bytes | memoryview]:
    """The file piece by piece; wide elements first, so that each tensor lies where its elements may lie.

    fetch: gives the numbers of a tensor that has none itself, when its turn has come.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries, end = {}, 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        entries[name] = {"dtype": NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    yield struct.pack("<Q", len(header)) + header
    for name in order:
        yield _bytes(tensors[name] if fetch is None else fetch(tensors[name]))


def size(tensors: Mapping[str, Tensor]) -> int:
    """About as many bytes as the file will have."""
    return sum(tensor.nbytes for tensor in tensors.values())


def decode(content: bytearray | memoryview) -> dict[str, Tensor]:
    """The tensors in a file's bytes, in place: they share memory with it."""
    entries, start = _header(content)
    if not entries:
        return {}
    data = torch.frombuffer(content, dtype=torch.uint8)[start:]
    position = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.begin):
        if entry.begin != position:
            raise BadTensors(f"the data of two tensors overlaps, or has a hole, at byte {position}")
        position = entry.end
    if position != len(data):
        raise BadTensors(f"holds {len(data)} bytes of data, {position} are described")
    return {name: _tensor(data, entry) for name, entry in entries.items()}


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _tensor(data: Tensor, entry: _Entry) -> Tensor:
    part = data[entry.begin : entry.end]
    if part.data_ptr() % entry.dtype.itemsize or part.storage_offset() % entry.dtype.itemsize:
        part = part.clone()  # another writer's file may put wide elements anywhere
    return part.view(entry.dtype).reshape(entry.shape)


def _header(content: bytearray | memoryview) -> tuple[dict[str, _Entry], int]:
    if len(content) < 8:
        raise BadTensors("is too short")
    (length,) = struct.unpack_from("<Q", content)
    if length > min(LARGEST_HEADER, len(content) - 8):
        raise BadTensors(f"its header claims {length} bytes")
    try:
        parsed = json.loads(bytes(content[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise BadTensors(f"its header cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise BadTensors("its header holds no tensors")
    parsed.pop("__metadata__", None)
    return {name: _entry(name, entry) for name, entry in parsed.items()}, 8 + length


def _entry(name: str, entry: Any) -> _Entry:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            known = dtype in DTYPES and all(type(side) is int and 0 <= side < LARGEST_SIDE for side in shape)
            if known and begin >= 0 and math.prod(shape) * DTYPES[dtype].itemsize == end - begin:
                return _Entry(DTYPES[dtype], shape, begin, end)
    raise BadTensors(f"its header describes {name!r} by {entry!r}")
