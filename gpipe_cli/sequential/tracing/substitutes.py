"""What torch functions receive in place of a model's tensors while the model is traced, and what they return.

The model itself runs, so that functions which close over its modules or tensors are recorded as its other code is.
Nothing is computed with its own parameters and buffers, and nothing is written to them.

torch computes shapes of many functions in Python, which takes up to a millisecond per call. A model calls the same
modules again in every block, and a trace runs it about ten times, so results on the meta device are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.sequential.deferred import meta_like
from gpipe_cli.sequential.tracing.graph import map_tree, tensors_in
from gpipe_cli.sequential.tracing.sample import in_other_dtype
from gpipe_cli.torch_internals.modules import without_function_modes
from gpipe_cli.torch_internals.tensors import storage_of, version_of

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
        self._stored = {}
        try:
            with torch.random.fork_rng(devices=[]), buffers_restored(module):
                yield
        finally:
            self._stored = None


@contextmanager
def buffers_restored(module: nn.Module) -> Iterator[None]:
    """Put buffers and their values back, such as the statistics of batch norm."""
    with without_function_modes():
        before = [
            (part, name, buffer, buffer.clone())
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]
    try:
        yield
    finally:
        with without_function_modes(), torch.no_grad():
            for part, name, buffer, values in before:
                setattr(part, name, buffer)  # a forward may have assigned another one
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


def needs_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function that failed without storage works with it; otherwise it does not accept such arguments."""
    real_args, real_kwargs = map_tree(with_values, (args, kwargs))
    try:
        with torch.random.fork_rng(devices=[]):
            func(*real_args, **real_kwargs)
    except (RuntimeError, TypeError):
        return False
    return True


def with_values(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_meta:
        return leaf
    return torch.ones(leaf.shape, dtype=leaf.dtype)


def without_values(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_like(leaf, device="meta", requires_grad=False)
