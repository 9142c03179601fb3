"""Parameters whose values are still in files: read where they are needed, one at a time, and nowhere else.

A model may be built with such parameters, traced and balanced. An engine then loads those of its own layers, each
straight to its device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn


@final
class UnloadedParameter(nn.Parameter):
    """A parameter on the meta device, with the function that reads its value."""

    read: Callable[[], Tensor]
    files: frozenset[Path]
    """The files that its value depends on."""

    @staticmethod
    def like(tensor: Tensor, read: Callable[[], Tensor], files: Iterable[Path] = ()) -> UnloadedParameter:
        """A parameter of the tensor's shape, dtype and requires_grad."""
        # Not empty_like: for a tensor of a subclass that would return the subclass again.
        outline = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        parameter = UnloadedParameter(outline, tensor.requires_grad)
        assert isinstance(parameter, UnloadedParameter)
        parameter.read, parameter.files = read, frozenset(files)
        return parameter

    def load(self, device: torch.device) -> nn.Parameter:
        """The parameter with its value, on a device."""
        return nn.Parameter(self.read().to(device), self.requires_grad)


def load_parameters(
    modules: Iterable[nn.Module], device: torch.device, users: Iterable[nn.Module] | None = None
) -> None:
    """Load the parameters that `users` use, by default all, wherever else in the modules they are.

    A parameter that is loaded already stays where it is.
    """
    modules = list(modules)
    needed = {
        parameter
        for user in (modules if users is None else users)
        for parameter in user.parameters()
        if isinstance(parameter, UnloadedParameter)
    }
    if not needed:
        return
    loaded: dict[UnloadedParameter, nn.Parameter] = {}
    for part in (part for module in modules for part in module.modules()):
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, UnloadedParameter) and parameter in needed:
                if parameter not in loaded:
                    loaded[parameter] = parameter.load(device)
                setattr(part, name, loaded[parameter])


def read_from(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let parameters that are not loaded yet take their values from `tensors`, by name, instead of from their files."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UnloadedParameter) and name in tensors:
            # A copy is aligned, which these tensors may not be: they may lie anywhere in the bytes of a file.
            parameter.read = partial(tensors[name].to, parameter.dtype, copy=True)
