"""What torch functions receive in place of a model's parameters and buffers while the model is traced.

The model itself runs, so that functions which close over its modules or tensors are recorded as its other code is.
Nothing is computed with its own tensors, and nothing is written to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.sequential.by_tracing.sample import in_other_dtype
from gpipe_cli.sequential.by_tracing.tree import map_tree, tensors_in
from gpipe_cli.sequential.without_storage import meta_like
from gpipe_cli.torch_internals.module_calls import without_function_modes

_SMALL = 2**16
"""Elements of a buffer that is traced with its values."""


@final
class Substitutes:
    def __init__(self, model: nn.Module, *, other_dtype: bool = False) -> None:
        self._originals = [*model.parameters(), *model.buffers()]  # alive, so that their ids stay theirs
        self._traced = {id(tensor): _traced(tensor, other_dtype) for tensor in self._originals}
        self._stored: dict[int, Tensor] | None = None

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._traced

    def of(self, tensor: Tensor) -> Tensor:
        """The substitute of a tensor of the model; any other tensor as it is."""
        if tensor not in self or self._stored is None:
            return self._traced.get(id(tensor), tensor)
        if id(tensor) not in self._stored:
            self._stored[id(tensor)] = _with_storage(tensor)
        return self._stored[id(tensor)]

    def within(self, tree: Any) -> Any:
        if not any(tensor in self for tensor in tensors_in(tree)):
            return tree
        return map_tree(lambda leaf: self.of(leaf) if isinstance(leaf, Tensor) else leaf, tree)

    @contextmanager
    def with_values(self, module: nn.Module) -> Iterator[None]:
        """Inside, substitutes have values. Compiled code takes none, so the buffers are restored."""
        with without_function_modes():
            before = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._stored = {}
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        finally:
            self._stored = None
            with without_function_modes(), torch.no_grad():
                for buffer, values in before:
                    buffer.copy_(values)


def _traced(tensor: Tensor, other_dtype: bool) -> Tensor:
    """A parameter or large buffer on the meta device, or a small buffer with its values."""
    if isinstance(tensor, nn.Parameter):
        traced: Tensor = nn.Parameter(meta_like(tensor).detach(), requires_grad=False)
    elif tensor.is_meta or tensor.numel() > _SMALL:
        traced = meta_like(tensor)
    else:
        traced = tensor.detach().to("cpu", copy=True)
    return in_other_dtype(traced) if other_dtype else traced


def _with_storage(tensor: Tensor) -> Tensor:
    """A copy on the CPU; a tensor without storage gets small random values."""
    if not tensor.is_meta:
        copied = tensor.detach().to("cpu", copy=True)
    elif tensor.is_floating_point():
        copied = torch.randn(tensor.shape, dtype=tensor.dtype) / 8
    else:
        copied = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
