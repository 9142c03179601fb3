"""Parameters that several layers share.

Each layer uses an alias of its own, so no two workers add to one gradient. The aliases' gradients are summed in the
order of the layers, so the bits are the same for every balance: once per mini-batch, or, in a step, once per
micro-batch if the parameter has hooks, because a hook need not be linear. The sum reaches the parameter through
autograd: hooks run, and an existing `.grad` is added to. Users tie, load and parametrize at any time, so the pipe
looks for shared parameters in every mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpipe_cli.torch_internals.engine import run_backward
from gpipe_cli.torch_internals.graph_task import has_hooks

__all__ = ["NO_ALIASES", "Aliases", "TiedParameters", "accumulate"]


@final
@dataclass(frozen=True, slots=True)
class _Use:
    module: nn.Module
    name: str
    parameter: nn.Parameter


@final
class Aliases:
    """Context manager: inside, the modules of one layer use aliases of their shared parameters."""

    __slots__ = ("_aliases", "_before", "_uses")

    def __init__(self, uses: Sequence[_Use]) -> None:
        self._uses = uses
        self._aliases = {parameter: _alias(parameter) for parameter in {use.parameter: None for use in uses}}

    def __enter__(self) -> None:
        # Not `use.parameter`: in a recomputation there may be another one by now.
        self._before = [use.module._parameters[use.name] for use in self._uses]
        for use in self._uses:
            setattr(use.module, use.name, self._aliases[use.parameter])

    def __exit__(self, *exception: object) -> None:
        for use, before in zip(self._uses, self._before, strict=True):
            setattr(use.module, use.name, before)

    def of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """What the layer uses in its place; None if the layer does not share it."""
        return self._aliases.get(parameter)

    def take_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        alias = self._aliases.get(parameter)
        if alias is None or alias.grad is None:
            return None
        gradient, alias.grad = alias.grad, None
        return gradient


NO_ALIASES = Aliases(())


@final
class TiedParameters:
    """Who shares what among the layers, now."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        users: dict[nn.Parameter, list[int]] = {}
        for place, layer in enumerate(layers):
            for parameter in layer.parameters():
                users.setdefault(parameter, []).append(place)
        self.trained = [parameter for parameter in users if parameter.requires_grad]
        """All parameters that require grad, shared or not."""
        self.users = [(parameter, places) for parameter, places in users.items() if len(places) > 1]
        """Each shared parameter and the layers that use it."""
        shared = {parameter for parameter, _ in self.users}
        self._uses = [_uses(layer, shared) for layer in layers] if shared else [[] for _ in layers]

    @property
    def any_hooks(self) -> bool:
        """Whether a hook runs when a gradient reaches a shared parameter."""
        return any(has_hooks(parameter) for parameter, _ in self.users)

    def aliases(self) -> list[Aliases]:
        """Fresh ones, one per layer."""
        return [Aliases(uses) if uses else NO_ALIASES for uses in self._uses]

    def total(self, parameter: nn.Parameter, aliases: Sequence[Aliases]) -> Tensor | None:
        """The gradient of all uses of a shared parameter, in the order of the layers; None if none has one."""
        total = None
        for of_layer in aliases:
            gradient = of_layer.take_gradient(parameter)
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total

    def add_up(self, aliases: Sequence[Aliases], but: Sequence[nn.Parameter] = ()) -> None:
        """Give each shared parameter, except those in `but`, the gradient of all its uses."""
        left_out = set(but)
        for parameter, _ in self.users:
            total = None if parameter in left_out else self.total(parameter, aliases)
            if total is not None:
                accumulate(parameter, total)


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to `.grad` as autograd does."""
    run_backward([get_gradient_edge(parameter)], [gradient], keep_graph=False)


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    # What users hang on a parameter, layers may look for.
    alias.__dict__.update(parameter.__dict__)
    return alias


def _uses(layer: nn.Module, shared: set[nn.Parameter]) -> list[_Use]:
    return [
        _Use(module, name, parameter)
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in shared
    ]
