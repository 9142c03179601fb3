"""Tensors by name as the bytes of a safetensors file, and back.

Written here rather than with the safetensors package: equal tensors give equal bytes, data streams to the disk without
a copy of the whole, and verified bytes are used in place.
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
from gpipe_cli.sequential.without_storage import placeholder
from gpipe_cli.torch_internals.tensor_memory import storage_of
from gpipe_cli.training.snapshot.header import MAX_HEADER_BYTES, BadTensors, TensorEntry, read_header

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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def unsupported_reason(value: Any) -> str | None:
    """Why a value cannot be written, or None."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}"
    if value.is_quantized:
        return "is quantized"
    if value.layout is not torch.strided:
        return f"is a {value.layout} tensor"
    if value.dtype not in DTYPE_NAMES:
        return f"has the dtype {value.dtype}"
    return None


def encode(
    tensors: Mapping[str, Tensor], fetch: Callable[[Tensor], Tensor] | None = None
) -> Iterator[bytes | memoryview]:
    """The file piece by piece. Wide elements come first, so that every tensor is aligned to its element size.

    fetch: for outlines of a TensorFile or the like, returns the tensor itself when its turn has come.
    """
    # Sorted, so that the bytes do not depend on the order in which the model names its tensors.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries, end = {}, 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        entries[name] = {
            "dtype": DTYPE_NAMES[tensors[name].dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # With the header padded, the data begins at a multiple of 8, the widest element size.
    header += b" " * (-len(header) % 8)
    yield struct.pack("<Q", len(header)) + header
    for name in order:
        tensor = tensors[name] if fetch is None else fetch(tensors[name])
        # As bytes before numpy, which has no bfloat16 and no float8.
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def decode(content: bytearray | memoryview) -> dict[str, Tensor]:
    """The tensors in a file's bytes; they share memory with it."""
    header = read_header(content, len(content))
    if not header.entries:
        return {}
    data = torch.frombuffer(content, dtype=torch.uint8)[header.start :]
    return {name: _view(data, entry) for name, entry in header.entries.items()}


def _view(data: Tensor, entry: TensorEntry) -> Tensor:
    dtype = DTYPES[entry.dtype]
    part = data[entry.begin : entry.end]
    if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
        part = part.clone()  # another writer's file may leave wide elements unaligned
    return part.view(dtype).reshape(entry.shape)


@final
class TensorFile:
    """A file that may be larger than memory; reads one tensor at a time.

    Not safetensors.safe_open: that maps the file into memory, where a file that is cut short while we read it ends the
    process by SIGBUS instead of raising, and it opens by path, so it would follow links below `base`.
    """

    def __init__(self, path: Path, base: Path | None = None) -> None:
        """base: the directory below which no link is followed; None for a file that the user named."""
        self._path, self._base = path, base
        with self._open() as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            header = read_header(head + file.read(min(length, MAX_HEADER_BYTES, size)), size)
        self._start = header.start
        self.outlines = {
            name: placeholder(entry.shape, DTYPES[entry.dtype]) for name, entry in header.entries.items()
        }
        """For each name a tensor of the right shape and dtype that takes the memory of one element."""
        self._entries = {storage_of(self.outlines[name]): entry for name, entry in header.entries.items()}

    def fetch(self, outline: Tensor) -> Tensor | None:
        """The tensor that one of the outlines stands for; None for any other tensor."""
        entry = self._entries.get(storage_of(outline))
        if entry is None:
            return None
        content = bytearray(entry.end - entry.begin)
        with self._open() as file:
            file.seek(self._start + entry.begin)
            read = file.readinto(content)
        if read != len(content):
            raise BadTensors(f"it has {read} bytes of a tensor instead of {len(content)}")
        if not content:
            return outline.new_empty(entry.shape)
        return torch.frombuffer(content, dtype=DTYPES[entry.dtype]).reshape(entry.shape)

    def _open(self) -> FileIO:
        return os.fdopen(open_regular(self._path, base=self._base), "rb", buffering=0)
