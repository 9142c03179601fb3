"""The parameters that an engine trains, in groups with an optimizer each, their state, and the average of the weights.

A model in memory is one group. Of an offloaded model each slice is a group, and so are the parameters that several
slices share: one optimizer of the whole model would want all of its state in memory at once.

The exponential moving average of the weights is kept beside them in training, and in their place in evaluation. It is a
part of the optimizer's state, so every engine, rank and slice has that of its own parameters, and whatever divides,
stores, counts or saves the state of an optimizer does the same with the average. A step that is skipped does not change
it. Buffers, such as the statistics of batch norms, are not averaged: both kinds of weights use those of the model.

In an engine's state, and so in a snapshot, the model has the averages, which are what users evaluate and
export; the weights in training are among the optimizer's tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from gpipe_cli.distributed.replicas import ParameterShards
from gpipe_cli.engines.state import (
    OTHER_WEIGHTS,
    UPDATES,
    EngineState,
    OptimizerState,
    check_optimizer,
    check_state,
    load_buffers,
    load_tensors,
    merged_numbers,
    module_state,
    parameter_of,
)
from gpipe_cli.offload.prefetcher import SlicePrefetcher
from gpipe_cli.offload.slices import ALL_WEIGHTS, Part, Slice
from gpipe_cli.offload.tiers import Tier
from gpipe_cli.offload.transfers import Transfers
from gpipe_cli.profiling.memory import MakeOptimizer

_WARM_UP: Final = 10
"""After n updates the decay is at most (1 + n) / (10 + n), or the average of a short run would be its first weights."""


@final
@dataclass
class ResidentGroup:
    """Trained parameters that stay where they are, with their optimizer."""

    trained: list[nn.Parameter]
    optimizer: torch.optim.Optimizer | None = None


Group = ResidentGroup | Slice


@final
@dataclass(frozen=True)
class OffloadedParameters:
    tier: Tier
    prefetchers: Sequence[SlicePrefetcher]
    """One per worker."""
    shared: Sequence[nn.Parameter]
    """Parameters of several slices, which stay on the device."""

    @property
    def transfers(self) -> Transfers:
        """All of them so far."""
        each = [prefetcher.worker.transfers for prefetcher in self.prefetchers]
        return Transfers(sum(own.moved_bytes for own in each), sum(own.waited_seconds for own in each))

    def close(self) -> None:
        """End the threads that move slices; calling it twice is fine."""
        for prefetcher in self.prefetchers:
            prefetcher.close()
        self.tier.close()


@final
class EngineParameters:
    def __init__(
        self,
        module: nn.Module,
        make: MakeOptimizer | None,
        *,
        offloaded: OffloadedParameters | None = None,
        shards: ParameterShards | None = None,
    ) -> None:
        """make: None where nothing is trained; shards: None if this process updates all its parameters."""
        self.module, self.offloaded, self.shards = module, offloaded, shards
        # Parameters on the meta device belong to other processes.
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.trained = [parameter for parameter in trained if not parameter.is_meta]
        """All whose gradients count, in the order of the model's names."""
        self.prefetchers = () if offloaded is None else offloaded.prefetchers
        self._slices = [each for prefetcher in self.prefetchers for each in prefetcher.slices.values()]
        shared = [] if offloaded is None else [each for each in offloaded.shared if each.requires_grad]
        self.resident = ResidentGroup(self.trained if offloaded is None else shared)
        self.are_trained = make is not None
        self._states: dict[int, OptimizerState] = {}
        if make is not None:
            self._make_optimizers(make)
        self._averages = any(
            group.optimizer and UPDATES in group.optimizer.param_groups[0] for group in self._groups
        )
        self._uses_averages = False

    @property
    def _groups(self) -> list[Group]:
        return [*self._slices, self.resident]

    def _make_optimizers(self, make: MakeOptimizer) -> None:
        check_optimizer(make)
        names = {each: name for name, each in self.module.named_parameters() if each.requires_grad}
        own = set(self.trained if self.shards is None else self.shards.own)
        # Stands in where a process has no parameters, because torch creates no optimizer without any.
        placeholder = nn.Parameter(torch.zeros(0))
        for group in self._groups:
            named = [(names[parameter], parameter) for parameter in group.trained if parameter in own]
            if named or self.offloaded is None:
                group.optimizer = make(named or [("", placeholder)])
                self._states[id(group)] = OptimizerState(group.optimizer, {**names, placeholder: ""}, make)
        if self.shards is not None and self.resident.optimizer is not None:
            exchange = self.shards.exchange
            self.resident.optimizer.register_step_post_hook(lambda *_: exchange())

    def visit(self, parts: Sequence[Part], changed: Collection[Part]) -> Iterator[Group]:
        """Each group, with these parts of it in memory; the caller changes some of them."""
        yield self.resident
        for prefetcher in self.prefetchers:
            yield from prefetcher.iter_loaded(parts, changed)

    def must_exchange(self, averages: bool) -> bool:
        """Whether `exchange_averages` must be called before the averages, or the weights in training, are used."""
        return self._averages and self._uses_averages != averages

    def exchange_averages(self) -> None:
        """With `ema`, put the averages in the place of the weights in training, or the other way round."""
        parts = (Part.WEIGHTS, Part.STATE)
        for group in self.visit(parts, parts):
            _exchange_weights(group.optimizer)
        if self.shards is not None:
            self.shards.exchange()
        self._uses_averages = not self._uses_averages

    def state(self, referenced: Collection[str]) -> EngineState:
        """Everything but the loss scale; without the tensors of the model named in `referenced`."""
        # Stores run in the background: only now does the tier hold the values of the last step.
        for prefetcher in self.prefetchers:
            prefetcher.wait_until_stored()
        state = module_state(self.module, referenced)
        if self.are_trained:
            taken = [own.take() for own in self._states.values()]
            numbers = merged_numbers([own for _, own in taken]) if taken else {"state": {}, "groups": []}
            tensors = dict(chain.from_iterable(own.items() for own, _ in taken))
            state = replace(state, optimizer=tensors, numbers={"optimizer": numbers})
        away = any(stored.has_placeholders for each in self._slices for stored in each.all_stored)
        return replace(state, fetch=self._fetch) if away else state

    def load(self, state: EngineState, referenced: Collection[str]) -> None:
        """Load group by group, so that no more of the model is in memory than while it trains."""
        loads_optimizer = self.are_trained and not state.resets_optimizer
        if loads_optimizer and not self._averages:
            state = _without_averages(state, self.module)
        # Everything is checked before the first tensor is written.
        check_state(self.module, state, referenced)
        for optimizer_state in self._states.values() if loads_optimizer else ():
            optimizer_state.check_names(map(parameter_of, state.optimizer))
        names: dict[Tensor, list[str]] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if name in state.model and not tensor.is_meta:  # or it belongs to another process
                names.setdefault(tensor, []).append(name)
        away = {parameter for each in self._slices for parameter in each.parameters}
        stays = (own for tensor, own in names.items() if tensor not in away)
        load_tensors(self.module, state, list(chain.from_iterable(stays)))
        load_buffers(self.module, state)
        if loads_optimizer:
            self._load_optimizer(state, self.resident)
        frozen = any(parameter in names for each in self._slices for parameter in each.frozen)
        parts = ALL_WEIGHTS if frozen else (Part.WEIGHTS,)
        for prefetcher in self.prefetchers:
            # The optimizer state is stored but not loaded, because all of it is replaced.
            for each in prefetcher.iter_loaded(parts, [*parts, Part.STATE]):
                own = chain.from_iterable(names.get(parameter, ()) for parameter in each.parameters)
                load_tensors(self.module, state, list(own))
                if loads_optimizer:
                    self._load_optimizer(state, each)
        if loads_optimizer:
            self._uses_averages = self._averages

    def _load_optimizer(self, state: EngineState, group: Group) -> None:
        if (own := self._states.get(id(group))) is not None:
            own.put(state.optimizer, state.numbers.get("optimizer", {}), state.value)

    def _fetch(self, tensor: Tensor) -> Tensor:
        """Read the value of a tensor of the state, which itself may have no storage."""
        values = (stored.get(tensor) for each in self._slices for stored in each.all_stored)
        return next((value for value in values if value is not None), tensor)


def average_weights(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Update the average after each step of the optimizer."""
    for group in optimizer.param_groups:
        group[UPDATES] = 0
    optimizer.register_step_post_hook(partial(_update_averages, decay))


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
def _exchange_weights(optimizer: torch.optim.Optimizer | None) -> None:
    """Put the averages in the place of the weights and the weights in the place of the averages."""
    if optimizer is None:
        return
    for parameter in _parameters(optimizer):
        if (other := optimizer.state.get(parameter, {}).get(OTHER_WEIGHTS)) is not None:
            # By value, because the memory of both may belong to a buffer that slices take turns in.
            weights = parameter.detach().clone()
            parameter.copy_(other)
            other.copy_(weights)


def _without_averages(state: EngineState, module: nn.Module) -> EngineState:
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
