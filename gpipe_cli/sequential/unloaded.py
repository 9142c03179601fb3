"""Parameters whose values are still in files: read where they are needed, one at a time, and nowhere else.

A model may be built with such parameters, traced and balanced. An engine then loads those of its own layers, each
straight to its device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor, nn


@final
class UnloadedParameter(nn.Parameter):
    """A parameter on the meta device, with the function that reads its value."""

    read: Callable[[], Tensor]

    @staticmethod
    def like(tensor: Tensor, read: Callable[[], Tensor]) -> UnloadedParameter:
        """A parameter of the tensor's shape, dtype and requires_grad."""
        # Not empty_like: for a tensor of a subclass that would return the subclass again.
        outline = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        parameter = UnloadedParameter(outline, tensor.requires_grad)
        assert isinstance(parameter, UnloadedParameter)
        parameter.read = read
        return parameter

    def load(self, device: torch.device) -> nn.Parameter:
        """The parameter with its value, on a device."""
        return nn.Parameter(self.read().to(device), self.requires_grad)


def load_parameters(
    module: nn.Module, device: torch.device, layers: Iterable[nn.Module] | None = None
) -> None:
    """Load the parameters that the layers, or all of the module, use, wherever else in the module they are.

    A parameter that is loaded already stays where it is.
    """
    needed = set(module.parameters() if layers is None else _parameters(layers))
    loaded: dict[UnloadedParameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, UnloadedParameter) and parameter in needed:
                if parameter not in loaded:
                    loaded[parameter] = parameter.load(device)
                setattr(part, name, loaded[parameter])


def _parameters(layers: Iterable[nn.Module]) -> Iterable[nn.Parameter]:
    return (parameter for layer in layers for parameter in layer.parameters())
