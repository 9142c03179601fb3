"""Which calls create, use and write each piece of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

from torch import Tensor

from gpipe_cli.sequential.by_tracing.recording import WriteSpan
from gpipe_cli.sequential.by_tracing.tree import tensors_in
from gpipe_cli.torch_internals.tensor_memory import storage_of, version_of

INPUTS = -1
"""The number that stands for a call that made the inputs."""


@final
class MemoryAccesses:
    """Storages are told apart by address, so the caller keeps every tensor alive."""

    def __init__(self) -> None:
        self._copied: dict[int, int] = {}
        self._created: dict[int, int] = {}
        self._used: dict[int, list[int]] = {}
        self._written: dict[int, int] = {}

    def copy(self, copied: Tensor, original: Tensor) -> None:
        """Let `copied` count as the memory of `original`."""
        self._copied[storage_of(copied)] = self._storage(original)

    def record(
        self, call: int, inputs: Iterable[Tensor], written: Iterable[Tensor], outputs: Iterable[Tensor]
    ) -> None:
        for storage in map(self._storage, inputs):
            self._used.setdefault(storage, []).append(call)
        for storage in map(self._storage, written):
            self._written[storage] = call
        for storage in map(self._storage, outputs):
            if storage not in self._used:  # otherwise a view of an input, or the model's own memory
                self._created.setdefault(storage, call)

    def write_spans(self) -> Iterator[WriteSpan]:
        for storage, writer in self._written.items():
            users = self._used[storage]
            if storage in self._created:
                yield WriteSpan(self._created[storage], writer)
            else:
                # The model's own memory: each reader must stay before or after the write, as it was.
                yield WriteSpan(users[0], users[-1])

    def _storage(self, tensor: Tensor) -> int:
        storage = storage_of(tensor)
        return self._copied.get(storage, storage)


@final
class Versions:
    """The tensors in some arguments, and which of them have been written in place since.

    autograd counts a tensor's in-place writes in its version, also on the meta device.
    """

    def __init__(self, arguments: Any) -> None:
        self.tensors = tensors_in(arguments)
        self._versions = [version_of(tensor) for tensor in self.tensors]

    def changed(self) -> list[int]:
        pairs = zip(self.tensors, self._versions, strict=True)
        return [index for index, (tensor, version) in enumerate(pairs) if version_of(tensor) != version]

    def written(self) -> list[Tensor]:
        return [self.tensors[index] for index in self.changed()]
