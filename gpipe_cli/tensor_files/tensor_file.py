"""Reads and writes safetensors files: single tensors of a file that may be larger than memory, or whole files as bytes.

The header of a file says which tensors it holds, and where; it is checked whole before anything uses it. Written here
rather than with the safetensors package: equal tensors give equal bytes, data streams to the disk without a copy of the
whole, and verified bytes are used in place.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.safe_files import open_regular, parse_json
from gpipe_cli.sequential.deferred import placeholder
from gpipe_cli.torch_internals.tensors import storage_of

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
"""The dtypes that are read, by the format's names."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100 * 2**20
MAX_ELEMENTS = 2**62
"""The largest product of all dimensions, with 1 for empty ones: torch computes it for strides too."""
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
            size = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES and _is_shape(shape) else None
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


@final
class TensorFile:
    """Checks the header when it is made; reads one tensor at a time.

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
        self._start, self._entries = header.start, header.entries
        self.metadata = header.metadata
        self.outlines = {
            name: placeholder(entry.shape, DTYPES[entry.dtype]) for name, entry in header.entries.items()
        }
        """For each name a tensor of the right shape and dtype that takes the memory of one element."""
        self._names = {storage_of(outline): name for name, outline in self.outlines.items()}

    def fetch(self, outline: Tensor) -> Tensor | None:
        """The tensor that one of the outlines stands for; None for any other tensor."""
        name = self._names.get(storage_of(outline))
        return None if name is None else self.read(name)

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        # Memory of torch, which is aligned: the bits of some kernels' results depend on where their input begins.
        # A storage rather than torch.empty, which makes no memory where models are built without storage.
        storage = torch.UntypedStorage(entry.end - entry.begin)  # type: ignore[no-untyped-call]
        content = torch.tensor([], dtype=torch.uint8).set_(storage)
        with self._open() as file:
            file.seek(self._start + entry.begin)
            missing = content.numpy().data
            while missing and (read := file.readinto(missing)):  # one call reads at most 2 GiB
                missing = missing[read:]
        if missing:
            raise BadTensors(f"it ends {len(missing)} bytes before the end of the tensor {name}")
        return content.view(DTYPES[entry.dtype]).reshape(entry.shape)

    def _open(self) -> FileIO:
        return os.fdopen(open_regular(self._path, base=self._base), "rb", buffering=0)


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
