"""Parameters that several layers share.

Each layer uses a parameter of its own with the same memory, so no two workers add to one gradient. The pipe sums these
gradients in the order of the layers, so the bits are the same for every balance: once per mini-batch, or, in a step,
once per micro-batch if the parameter has hooks, because a hook need not be linear. The sum reaches the parameter
through autograd: hooks run, and an existing `.grad` is added to. Users tie, load and parametrize at any time, so the
pipe looks for shared parameters in every mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpipe_cli.torch_internals.autograd_engine import run_backward
from gpipe_cli.torch_internals.autograd_graph import has_hooks


@final
@dataclass(frozen=True, slots=True)
class _Use:
    module: nn.Module
    name: str
    parameter: nn.Parameter


@final
class Untied:
    """Context manager: inside, the modules of one layer use parameters of their own in place of the shared ones.

    They share the memory, so only the gradients are separate.
    """

    __slots__ = ("_before", "_parameters", "_uses")

    def __init__(self, uses: Sequence[_Use]) -> None:
        self._uses = uses
        self._parameters = {use.parameter: _detached_parameter(use.parameter) for use in uses}

    def __enter__(self) -> None:
        # Not `use.parameter`: the user may have replaced it before a recompute.
        self._before = [use.module._parameters[use.name] for use in self._uses]
        # Only the worker that runs this layer touches its modules, so the swap needs no lock.
        for use in self._uses:
            setattr(use.module, use.name, self._parameters[use.parameter])

    def __exit__(self, *exception: object) -> None:
        for use, before in zip(self._uses, self._before, strict=True):
            setattr(use.module, use.name, before)

    def of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The parameter that the layer uses instead; None if the layer does not share `parameter`."""
        return self._parameters.get(parameter)

    def take_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        own = self._parameters.get(parameter)
        if own is None or own.grad is None:
            return None
        gradient, own.grad = own.grad, None
        return gradient


NOTHING_TIED = Untied(())


@final
class TiedParameters:
    """Which layers share which parameters, as of now."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        users: dict[nn.Parameter, list[int]] = {}
        for place, layer in enumerate(layers):
            for parameter in layer.parameters():
                users.setdefault(parameter, []).append(place)
        self.trained = [parameter for parameter in users if parameter.requires_grad]
        """All parameters that require grad, shared or not, once each."""
        self.users = [(parameter, places) for parameter, places in users.items() if len(places) > 1]
        """Each shared parameter and the layers that use it."""
        shared = {parameter for parameter, _ in self.users}
        self._uses = [_uses(layer, shared) for layer in layers] if shared else [[] for _ in layers]

    @property
    def any_hooks(self) -> bool:
        """Whether a hook runs when a gradient reaches a shared parameter."""
        return any(has_hooks(parameter) for parameter, _ in self.users)

    def untied(self, *, enabled: bool = True) -> list[Untied]:
        """A fresh set of separate parameters, one object per layer."""
        return [Untied(uses) if uses and enabled else NOTHING_TIED for uses in self._uses]

    def total(self, parameter: nn.Parameter, untied: Sequence[Untied]) -> Tensor | None:
        """The gradient of all uses of a shared parameter, in the order of the layers; None if no use has one."""
        return sum_present([layer.take_gradient(parameter) for layer in untied])

    def add_up(self, untied: Sequence[Untied], but: Sequence[nn.Parameter] = ()) -> None:
        """Give each shared parameter, except those in `but`, the gradient of all its uses."""
        excluded = set(but)
        for parameter, _ in self.users:
            total = None if parameter in excluded else self.total(parameter, untied)
            if total is not None:
                accumulate(parameter, total)


def sum_present(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that are not None, from the first to the last."""
    total = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to `.grad` as autograd does."""
    run_backward([get_gradient_edge(parameter)], [gradient], keep_graph=False)


def _detached_parameter(parameter: nn.Parameter) -> nn.Parameter:
    detached = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    # Layers may look for attributes that users set on a parameter.
    detached.__dict__.update(parameter.__dict__)
    return detached


def _uses(layer: nn.Module, shared: set[nn.Parameter]) -> list[_Use]:
    return [
        _Use(module, name, parameter)
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in shared
    ]
