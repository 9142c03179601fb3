"""Freeze parameters by name: they have no gradient, and norms whose parameters are all frozen stay in eval mode.

A batch norm in train mode would go on changing its running statistics, and with them what a frozen layer computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.parameter_names import matches, names_at, select_parameters


@final
@dataclass(frozen=True)
class FrozenParameters:
    patterns: tuple[str, ...]
    """As the user gave them."""
    names: tuple[str, ...]
    """Of the parameters they match."""
    elements: int
    all_elements: int
    """Of the whole model."""

    def __str__(self) -> str:
        numbers = f"{self.elements:,} of {self.all_elements:,} parameters"
        return f"{len(self.names)} tensors with {numbers}: {', '.join(self.patterns)}"


def freeze(model: nn.Sequential, patterns: Sequence[str], key: str = "freeze") -> FrozenParameters | None:
    """Freeze what the patterns match; None without patterns. Raises ConfigError if nothing is left to train."""
    if not patterns:
        return None
    frozen = select_parameters(model, patterns, key)
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    held = set(frozen.values())
    for path, module in model.named_modules(remove_duplicate=False):
        own = set(module.parameters(recurse=False))
        # A norm without parameters is frozen with the layer that it is in.
        named = any(matches(pattern, name) for pattern in patterns for name in names_at(model, path))
        if tracks_statistics(module) and (own <= held if own else named):
            keep_in_eval_mode(module)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{key}=[{','.join(patterns)}]: freezes every parameter of the model, so that there is nothing to train; "
            "leave out at least one layer"
        )
    return FrozenParameters(
        tuple(patterns),
        tuple(frozen),
        sum(parameter.numel() for parameter in frozen.values()),
        sum(parameter.numel() for parameter in model.parameters()),
    )


def tracks_statistics(module: nn.Module) -> bool:
    """Whether it is a batch norm, or another module that keeps running statistics."""
    return any(name.startswith("running_") for name, _ in module.named_buffers(recurse=False))


def keep_in_eval_mode(module: nn.Module) -> None:
    """Make `train()` of the module, and of every module that contains it, leave it in eval mode."""
    # Not a bound method: a partial is copied together with the module that it refers to.
    module.train = partial(_stay_in_eval_mode, module)  # type: ignore[method-assign]
    module.eval()


def stays_in_eval_mode(module: nn.Module) -> bool:
    train = vars(module).get("train")
    return isinstance(train, partial) and train.func is _stay_in_eval_mode


def _stay_in_eval_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(module, False)
