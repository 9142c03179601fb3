"""Reads single tensors of a safetensors file, which may be larger than memory."""

from __future__ import annotations

import os
import struct
from io import FileIO
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from gpipe_cli.safe_files import open_regular
from gpipe_cli.sequential.without_storage import placeholder
from gpipe_cli.tensor_files.header import MAX_HEADER_BYTES, BadTensors, read_header
from gpipe_cli.torch_internals.tensor_memory import storage_of

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
