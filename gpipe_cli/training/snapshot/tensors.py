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
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.torch_internals.storage import storage_of

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
    entries, start = _header(content, len(content))
    if not entries:
        return {}
    _check_filled(entries, len(content) - start)
    data = torch.frombuffer(content, dtype=torch.uint8)[start:]
    return {name: _tensor(data, entry) for name, entry in entries.items()}


@final
class TensorFile:
    """A file that may be larger than memory: what is in it, and one tensor at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            entries, self._start = _header(head + file.read(min(length, LARGEST_HEADER)), size)
        _check_filled(entries, size - self._start)
        self.outlines = {
            name: torch.zeros((), dtype=entry.dtype).expand(entry.shape) for name, entry in entries.items()
        }
        """A tensor of each name that looks like the one in the file, and has none of its numbers."""
        self._entries = {storage_of(self.outlines[name]): entry for name, entry in entries.items()}

    def fetch(self, outline: Tensor) -> Tensor | None:
        """The tensor one of the outlines stands for; None for any other."""
        entry = self._entries.get(storage_of(outline))
        if entry is None:
            return None
        content = bytearray(entry.end - entry.begin)
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._start + entry.begin)
            read = file.readinto(content)
        if read != len(content):
            raise BadTensors(f"has {read} bytes of a tensor instead of {len(content)}")
        if not content:
            return outline.new_empty(entry.shape)
        return torch.frombuffer(content, dtype=entry.dtype).reshape(entry.shape)


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


def _check_filled(entries: Mapping[str, _Entry], size: int) -> None:
    """One tensor after another, and nothing else."""
    position = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.begin):
        if entry.begin != position:
            raise BadTensors(f"the data of two tensors overlaps, or has a hole, at byte {position}")
        position = entry.end
    if position != size:
        raise BadTensors(f"holds {size} bytes of data, {position} are described")


def _header(content: bytes | bytearray | memoryview, size: int) -> tuple[dict[str, _Entry], int]:
    """From the beginning of a file of that size: what is in it, and where the data begins."""
    if len(content) < 8:
        raise BadTensors("is too short")
    (length,) = struct.unpack_from("<Q", content)
    if length > min(LARGEST_HEADER, size - 8):
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
