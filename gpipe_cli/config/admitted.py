"""What the `_target_` of each group may be: a builder of ours by its exact name, or something of a known kind.

Of gpipe_cli a group takes what its own YAML files under conf/ name, so a new component is still one .py and one
.yaml. Of torch and torchvision it takes a kind: layers, losses, optimizers, registered model builders. Where a name
lives says nothing: `torch.nn` also holds `torch`, and `gpipe_cli.engines` also opens files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, final

from gpipe_cli.config.locate import options

__all__ = ["admits_name", "admits_object", "described", "own_targets"]

DATASETS = ("FakeData", "ImageFolder", "MNIST", "FashionMNIST", "KMNIST")
"""Of torchvision's datasets those that unpickle nothing but tensors."""


@final
@dataclass(frozen=True)
class Kind:
    """What a group takes of other packages."""

    words: str
    below: tuple[str, ...]
    """How its name begins."""
    holds: Callable[[Any], bool]


def admits_name(target: str, group: str) -> bool:
    """Whether the name alone may be right; imports nothing."""
    kind = KINDS.get(group)
    return target in own_targets(group) or (kind is not None and target.startswith(kind.below))


def admits_object(target: str, found: Any, group: str) -> bool:
    """Whether what the name stands for is what the group takes."""
    kind = KINDS.get(group)
    return target in own_targets(group) or (kind is not None and kind.holds(found))


def described(group: str) -> str:
    """What the group takes, in words."""
    kind = KINDS.get(group)
    return ", ".join([*([] if kind is None else [kind.words]), *sorted(own_targets(group))])


@cache
def own_targets(group: str) -> frozenset[str]:
    return frozenset(option.target for option in options(group) if option.target is not None)


def _is_layer(found: Any) -> bool:
    from torch import nn

    # Wrappers for several devices and parametrisations are modules too, but live elsewhere.
    return (
        inspect.isclass(found)
        and issubclass(found, nn.Module)
        and found.__module__.startswith("torch.nn.modules.")
    )


def _is_model(found: Any) -> bool:
    from torch import fx, nn

    from gpipe_cli.vision import torchvision

    if _is_layer(found) or found is torchvision.models.get_model:
        return True
    if inspect.isclass(found):
        is_module = issubclass(found, nn.Module) and found.__module__.startswith("torchvision.models.")
        return is_module and not issubclass(found, fx.GraphModule)  # which compiles the code it is given
    models = torchvision.models
    return found in {models.get_model_builder(name) for name in models.list_models()}


def _is_loss(found: Any) -> bool:
    return _is_layer(found) and found.__module__ == "torch.nn.modules.loss"


def _is_optimizer(found: Any) -> bool:
    from torch.optim import Optimizer

    return (
        inspect.isclass(found)
        and issubclass(found, Optimizer)
        and found is not Optimizer
        and f"{found.__module__}.".startswith("torch.optim.")
    )


def _is_dataset(found: Any) -> bool:
    from gpipe_cli.vision import torchvision

    return any(found is getattr(torchvision.datasets, name) for name in DATASETS)


KINDS = {
    "model": Kind(
        "a layer of torch.nn, a model of torchvision.models", ("torch.nn.", "torchvision.models."), _is_model
    ),
    "loss": Kind("a loss of torch.nn", ("torch.nn.",), _is_loss),
    "optimizer": Kind("an optimizer of torch.optim", ("torch.optim.",), _is_optimizer),
    "data": Kind(
        f"one of torchvision.datasets.{{{','.join(DATASETS)}}}",
        tuple(f"torchvision.datasets.{name}" for name in DATASETS),
        _is_dataset,
    ),
}
