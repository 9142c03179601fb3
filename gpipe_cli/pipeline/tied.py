"""Parameters that several layers share.

Decides that each layer uses an alias of its own, so that no two workers add to one gradient, and that the
aliases' gradients are summed once per mini-batch, in the order of the layers: the bits are the same however the
layers are divided. Knows nothing of workers or partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

__all__ = ["Aliases", "TiedParameters"]


@final
@dataclass(frozen=True, slots=True)
class _Use:
    module: nn.Module
    name: str
    parameter: nn.Parameter


@final
class Aliases:
    """Context manager: inside, the modules of one layer use aliases of their shared parameters."""

    __slots__ = ("_aliases", "_uses")

    def __init__(self, uses: Sequence[_Use]) -> None:
        self._uses = uses
        distinct = dict.fromkeys(use.parameter for use in uses)
        self._aliases = {
            parameter: nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            for parameter in distinct
        }

    def __enter__(self) -> None:
        for use in self._uses:
            setattr(use.module, use.name, self._aliases[use.parameter])

    def __exit__(self, *exception: object) -> None:
        for use in self._uses:
            setattr(use.module, use.name, use.parameter)

    def take_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        alias = self._aliases.get(parameter)
        if alias is None or alias.grad is None:
            return None
        gradient, alias.grad = alias.grad, None
        return gradient


NO_ALIASES = Aliases(())


@final
class TiedParameters:
    """Who shares what among the layers, found once."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        uses = [_uses(layer) for layer in layers]
        holders = [{use.parameter for use in of_one} for of_one in uses]
        everywhere = dict.fromkeys(use.parameter for of_one in uses for use in of_one)
        self._shared = [leaf for leaf in everywhere if sum(leaf in held for held in holders) > 1]
        shared = set(self._shared)
        self._uses = [[use for use in of_one if use.parameter in shared] for of_one in uses]

    @property
    def users(self) -> list[tuple[nn.Parameter, list[int]]]:
        """Each shared parameter and the layers that use it."""
        return [
            (
                parameter,
                [
                    place
                    for place, uses in enumerate(self._uses)
                    if any(use.parameter is parameter for use in uses)
                ],
            )
            for parameter in self._shared
        ]

    def aliases(self) -> list[Aliases]:
        """Fresh ones for one mini-batch, one per layer."""
        return [Aliases(uses) if uses else NO_ALIASES for uses in self._uses]

    def add_up(self, aliases: Sequence[Aliases]) -> None:
        """Add the aliases' gradients to their parameters, layer by layer."""
        for parameter in self._shared:
            for of_layer in aliases:
                gradient = of_layer.take_gradient(parameter)
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _uses(layer: nn.Module) -> list[_Use]:
    return [
        _Use(module, name, parameter)
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
