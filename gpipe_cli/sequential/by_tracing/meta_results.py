"""Remember what functions and modules return on the meta device.

torch computes shapes of many functions in Python, which takes up to a millisecond per call. A model calls the same
modules again in every block, and a trace runs it about ten times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.sequential.by_tracing.tree import tensors_in
from gpipe_cli.torch_internals.tensor_memory import storage_of, version_of


@final
class MetaResults:
    """Results of calls that return one new tensor and write none."""

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[Any, ...]] = {}
        self._modules: dict[nn.Module, Hashable] = {}

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        key: Hashable = None,
    ) -> Any:
        """Return `target(*args, **kwargs)`; targets with the same key do the same."""
        try:
            signature = (key or target, _signature(args), _signature(kwargs))
            result = self._results.get(signature)
        except TypeError:  # an argument that cannot be hashed
            return target(*args, **kwargs)
        if result is not None:
            shape, stride, dtype = result
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        inputs = tensors_in((args, kwargs))
        versions = [version_of(tensor) for tensor in inputs]
        output = target(*args, **kwargs)
        is_new = (
            type(output) is Tensor
            and output.is_meta
            and storage_of(output) not in map(storage_of, inputs)
            and versions == [version_of(tensor) for tensor in inputs]
        )
        if is_new:
            self._results[signature] = (tuple(output.shape), output.stride(), output.dtype)
        return output

    def module_key(self, module: nn.Module) -> Hashable:
        """Equal for modules of torch.nn that compute the same shapes; None for others."""
        if not type(module).__module__.startswith("torch.nn.modules."):
            return None
        if module not in self._modules:
            shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in module.parameters())
            self._modules[module] = (type(module), module.extra_repr(), shapes)
        return (self._modules[module], module.training)


def _signature(tree: Any) -> Hashable:
    if isinstance(tree, Tensor):
        return Tensor, tuple(tree.shape), tree.stride(), tree.dtype, tree.is_meta
    if isinstance(tree, tuple | list):
        return type(tree), *map(_signature, tree)
    if isinstance(tree, dict):
        return dict, *((key, _signature(value)) for key, value in tree.items())
    if isinstance(tree, slice):
        return slice, tree.start, tree.stop, tree.step
    hash(tree)
    return type(tree), tree
