"""Tensors by name as the bytes of a safetensors file, and back.

The format is public (a length, a JSON header, raw little-endian data), any reader of it reads these files. Written
here so that equal tensors give equal bytes, that data streams to the disk without a copy of the whole, and that
what was verified in memory is used in place. What a header says is the matter of `header`.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.safe_files import open_regular
from gpipe_cli.torch_internals.storage import storage_of
from gpipe_cli.training.snapshot.header import LARGEST_HEADER, BadTensors, Entry, read_header

__all__ = ["DTYPES", "BadTensors", "TensorFile", "decode", "encode", "problem", "size"]

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
    header = read_header(content, len(content))
    if not header.entries:
        return {}
    data = torch.frombuffer(content, dtype=torch.uint8)[header.start :]
    return {name: _tensor(data, entry) for name, entry in header.entries.items()}


@final
class TensorFile:
    """A file that may be larger than memory: what is in it, and one tensor at a time."""

    def __init__(self, path: Path, base: Path | None = None) -> None:
        """base: the directory below which no link is followed; None for a file that the user named."""
        self._path, self._base = path, base
        with self._opened() as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            header = read_header(head + file.read(min(length, LARGEST_HEADER, size)), size)
        self._start = header.start
        self.outlines = {
            name: torch.zeros((), dtype=DTYPES[entry.dtype]).expand(entry.shape)
            for name, entry in header.entries.items()
        }
        """A tensor of each name that looks like the one in the file, and has none of its numbers."""
        self._entries = {storage_of(self.outlines[name]): entry for name, entry in header.entries.items()}

    def fetch(self, outline: Tensor) -> Tensor | None:
        """The tensor one of the outlines stands for; None for any other."""
        entry = self._entries.get(storage_of(outline))
        if entry is None:
            return None
        content = bytearray(entry.end - entry.begin)
        with self._opened() as file:
            file.seek(self._start + entry.begin)
            read = file.readinto(content)
        if read != len(content):
            raise BadTensors(f"has {read} bytes of a tensor instead of {len(content)}")
        if not content:
            return outline.new_empty(entry.shape)
        return torch.frombuffer(content, dtype=DTYPES[entry.dtype]).reshape(entry.shape)

    def _opened(self) -> FileIO:
        return os.fdopen(open_regular(self._path, base=self._base), "rb", buffering=0)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _tensor(data: Tensor, entry: Entry) -> Tensor:
    dtype = DTYPES[entry.dtype]
    part = data[entry.begin : entry.end]
    if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
        part = part.clone()  # another writer's file may put wide elements anywhere
    return part.view(dtype).reshape(entry.shape)
