"""Models without values: copies on the meta device, which never have any, and parameters whose values come later.

A deferred parameter knows how to get its value, from a file for example. A model with such parameters is traced and
balanced, and an engine then loads those of its own layers, one at a time, each straight to its device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.torch_internals.deferred_values import DeferredValues, replace_value, tensors_in_attributes


def meta_clone(model: nn.Module) -> nn.Module:
    """Copy a model with its parameters and buffers on the meta device."""
    return clone_with(model, meta_like)


def move_to_meta(model: nn.Module) -> None:
    """Put the parameters and buffers of a model on the meta device; tensors that are shared stay shared."""
    metas: dict[Tensor, Tensor] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    if tensor not in metas:
                        metas[tensor] = meta_like(tensor)
                    table[name] = metas[tensor]


def clone_with(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a model with `replace(tensor)` for each parameter and buffer; tensors that are shared stay shared.

    Tensors in plain attributes are not copied, because a forward may compute constants from their values. The
    exception are meta tensors, which have no values.
    """
    plain = [
        value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)
    ]
    # deepcopy takes what the memo holds for an object's id instead of copying that object.
    memo: dict[int, object] = {id(value): value for value in plain}
    for tensor in chain(model.parameters(), model.buffers(), (value for value in plain if value.is_meta)):
        memo[id(tensor)] = replace(tensor)
    return copy_module(model, memo)


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """copy.deepcopy, which however lets functions in attributes go on to use the modules that were copied."""
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        for name, value in vars(part).items():
            if isinstance(value, FunctionType):
                vars(part)[name] = _rebound(value, memo)
    return copied


def _rebound(function: FunctionType, memo: Mapping[int, Any]) -> FunctionType:
    """The function with copies in its closure and defaults, of whatever was copied."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    closure = tuple(CellType(memo.get(id(content), content)) for content in cells)
    defaults = tuple(memo.get(id(default), default) for default in function.__defaults__ or ())
    bound = FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, closure or None
    )
    named = function.__kwdefaults__ or {}
    bound.__kwdefaults__ = {name: memo.get(id(default), default) for name, default in named.items()}
    return bound


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor, or parameter, of the same shape and dtype on the meta device."""
    meta = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def placeholder(shape: Sequence[int], dtype: torch.dtype, value: float = 0) -> Tensor:
    """A tensor of this shape that takes the memory of a single number: every element is `value`."""
    return torch.full((), value, dtype=dtype).expand(tuple(shape))


@final
class DeferredParameter(nn.Parameter):
    """A parameter on the meta device, with the function that reads or computes its value."""

    read: Callable[[], Tensor]
    files: frozenset[Path]
    """The files that its value depends on."""

    @staticmethod
    def like(tensor: Tensor, read: Callable[[], Tensor], files: Iterable[Path] = ()) -> DeferredParameter:
        """A parameter of the tensor's shape, dtype and requires_grad."""
        # Not empty_like: for a tensor of a subclass that would return the subclass again.
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return DeferredParameter.of(nn.Parameter(meta, tensor.requires_grad), read, files)

    @staticmethod
    def of(
        parameter: nn.Parameter, read: Callable[[], Tensor], files: Iterable[Path] = ()
    ) -> DeferredParameter:
        """The parameter itself, wherever a module keeps it, which from now on is deferred."""
        parameter.__class__ = DeferredParameter
        assert isinstance(parameter, DeferredParameter)
        parameter.read, parameter.files = read, frozenset(files)
        return parameter

    def become(self, value: Tensor) -> None:
        """Have this value, wherever a module keeps the parameter, and be a plain one."""
        replace_value(self, value)
        del self.read, self.files
        self.__class__ = nn.Parameter  # type: ignore[assignment]


def load_parameters(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Load the parameters of the modules to the device; one that is loaded already stays where it is."""
    for module in modules:
        for parameter in module.parameters():
            if isinstance(parameter, DeferredParameter):
                parameter.become(parameter.read().to(device))


def defer_parameters(module: nn.Module, values: DeferredValues) -> None:
    """Let the large parameters of a module that was built within `values.recording` be deferred."""
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter and values.includes(parameter):
            DeferredParameter.of(parameter, partial(values.value_of, parameter.detach()))


def fill_others(modules: Iterable[nn.Module], values: DeferredValues) -> None:
    """Give buffers and other tensors of the modules their values; layers may read and write them at any time."""
    tensors = tensors_in_attributes(part for module in modules for part in module.modules())
    values.fill(tensor for tensor in tensors if not isinstance(tensor, DeferredParameter))


def read_from(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let parameters that are not loaded yet take their values from `tensors`, by name, instead of their own."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DeferredParameter) and name in tensors:
            # A copy is aligned, which these tensors may not be: they may lie anywhere in the bytes of a file.
            parameter.read = partial(tensors[name].to, parameter.dtype, copy=True)
