"""Tensors by name as the bytes of a safetensors file, and back.

Written here rather than with the safetensors package: equal tensors give equal bytes, data streams to the disk without
a copy of the whole, and verified bytes are used in place.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gpipe_cli.tensor_files.tensor_file import DTYPES, TensorEntry, read_header

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
    tensors: Mapping[str, Tensor],
    fetch: Callable[[Tensor], Tensor] | None = None,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[bytes | memoryview]:
    """The file piece by piece. Wide elements come first, so that every tensor is aligned to its element size.

    fetch: for outlines of a TensorFile or the like, returns the tensor itself when its turn has come.
    """
    # Sorted, so that the bytes do not depend on the order in which the model names its tensors.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
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
