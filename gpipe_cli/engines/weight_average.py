"""The exponential moving average of the weights: kept beside them in training, in their place in evaluation.

The average is a part of the optimizer's state, so every engine, rank and slice has that of its own parameters, and
whatever divides, stores, counts or saves the state of an optimizer does the same with the average. A step that is
skipped does not change it. Buffers, such as the statistics of batch norms, are not averaged: both kinds of weights use
those of the model.

In an engine's state, and so in a snapshot, the model has the averages, which are what users evaluate and
export; the weights in training are among the optimizer's tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from gpipe_cli.engines.state import OTHER_WEIGHTS, UPDATES, EngineState

_WARM_UP: Final = 10
"""After n updates the decay is at most (1 + n) / (10 + n), or the average of a short run would be its first weights."""


def average_weights(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Update the average after each step of the optimizer."""
    for group in optimizer.param_groups:
        group[UPDATES] = 0
    optimizer.register_step_post_hook(partial(_update_averages, decay))


def is_averaging(optimizer: torch.optim.Optimizer) -> bool:
    return UPDATES in optimizer.param_groups[0]


@torch.no_grad()
def _update_averages(decay: float, optimizer: torch.optim.Optimizer, *step_arguments: Any) -> None:
    updates = optimizer.param_groups[0][UPDATES]
    for group in optimizer.param_groups:
        group[UPDATES] = updates + 1
    now = min(decay, (1 + updates) / (_WARM_UP + updates))
    average = get_ema_multi_avg_fn(now)  # type: ignore[no-untyped-call]
    # torch averages all tensors of a device and dtype at once.
    pairs: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for parameter in _parameters(optimizer):
        state = optimizer.state.get(parameter, {})
        if OTHER_WEIGHTS in state:
            pairs[parameter.device, parameter.dtype].append((state[OTHER_WEIGHTS], parameter))
        elif parameter.grad is not None:  # before its first update the average would be the parameter itself
            optimizer.state[parameter][OTHER_WEIGHTS] = parameter.detach().clone()
    for own in pairs.values():
        averages, weights = zip(*own, strict=True)
        average(averages, weights, updates)


@torch.no_grad()
def exchange_weights(optimizer: torch.optim.Optimizer | None) -> None:
    """Put the averages in the place of the weights and the weights in the place of the averages."""
    if optimizer is None:
        return
    for parameter in _parameters(optimizer):
        if (other := optimizer.state.get(parameter, {}).get(OTHER_WEIGHTS)) is not None:
            # By value, because the memory of both may belong to a buffer that slices take turns in.
            weights = parameter.detach().clone()
            parameter.copy_(other)
            other.copy_(weights)


def without_averages(state: EngineState, module: nn.Module) -> EngineState:
    """The state for a run that continues without the average: the model has the weights in training."""
    suffix = f"/{OTHER_WEIGHTS}"
    weights = {
        path.removesuffix(suffix): tensor for path, tensor in state.optimizer.items() if path.endswith(suffix)
    }
    first_names = {parameter: name for name, parameter in module.named_parameters()}
    # A tied parameter has several names in the model, and one in the optimizer.
    names = {
        name: first_names[parameter]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if first_names[parameter] in weights
    }
    return replace(
        state,
        model={**state.model, **{name: weights[first] for name, first in names.items()}},
        optimizer={path: tensor for path, tensor in state.optimizer.items() if not path.endswith(suffix)},
    )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
