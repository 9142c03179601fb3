"""The engine of a model that comes and goes in slices: a pipe's, and what it takes to update and save them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.engines.protocol import Batch, Objective, StepFacts
from gpipe_cli.engines.slice_update import Group, SliceUpdate
from gpipe_cli.engines.state import (
    EngineState,
    OptimizerState,
    check_optimizer,
    check_state,
    merged_numbers,
    module_state,
)
from gpipe_cli.engines.stepping import Pipe, PipeEngine, load_scaler
from gpipe_cli.errors import RunError
from gpipe_cli.offload.rotation import Rotation
from gpipe_cli.offload.sizing import layer_bytes, optimizer_bytes
from gpipe_cli.offload.slice import Part, Slice
from gpipe_cli.offload.tiers import CpuTier, DiskTier, Tier
from gpipe_cli.offload.transfers import Transfers
from gpipe_cli.profiling.optimizer_state import OptimizerStateShapes

__all__ = ["Away", "SlicedEngine", "kept_bytes", "make_tier"]


@final
@dataclass(frozen=True)
class Away:
    """A model that is kept elsewhere."""

    tier: Tier
    rotations: Sequence[Rotation]
    """One per worker."""
    shared: Sequence[nn.Parameter]
    """Parameters of several slices, which stay on the device."""

    def close(self) -> None:
        """End what moves slices; twice is fine."""
        for rotation in self.rotations:
            rotation.close()
        self.tier.close()


def make_tier(
    to: str,
    device: torch.device,
    scratch: Path,
    module: nn.Sequential,
    objective: Objective,
    borders: Callable[[], int],
) -> Tier:
    """With room for all that will be kept: a full disk is to be noticed now, not in the middle of a step.

    borders: bytes of what slices are recomputed from.
    """
    if to != "disk":
        return CpuTier(device)
    tier = DiskTier(scratch)
    tier.reserve(sum(layer_bytes(module)) + sum(kept_bytes(module, objective)) + borders())
    return tier


def kept_bytes(module: nn.Sequential, objective: Objective) -> list[int]:
    """For each layer what is kept besides its weights, once it has been trained."""
    states = optimizer_bytes(module, objective.optimizer)
    if objective.clip_grad_norm is None and objective.precision != "fp16":
        return states
    # An update has to wait for all gradients, which are kept until then.
    return [state + gradients for state, gradients in zip(states, layer_bytes(module), strict=True)]


@final
class SlicedEngine:
    def __init__(
        self,
        pipe: Pipe,
        module: nn.Sequential,
        objective: Objective,
        away: Away,
        *,
        balance: Sequence[int],
        first: torch.device,
        last: torch.device,
        eval_chunks: int,
    ) -> None:
        self.module = module
        self._rotations = away.rotations
        self._away = away
        self._shared = Group([one for one in away.shared if one.requires_grad])
        self._update = self._make_update(objective, last)
        self._kept = self._optimizer_states(objective)
        self._engine = PipeEngine(
            pipe,
            module,
            replace(objective, optimizer=None),
            balance=balance,
            first=first,
            last=last,
            eval_chunks=eval_chunks,
            update=self._update,
        )

    def train_step(self, batch: Batch, key: int, lr: float) -> StepFacts:
        assert self._update is not None, "an engine without an optimizer cannot train"
        before = self._transfers()
        self._update.lr = lr
        facts = self._engine.train_step(batch, key, lr)
        return replace(facts, transfers=self._transfers().since(before))

    def eval_step(self, batch: Batch) -> StepFacts:
        return self._engine.eval_step(batch)

    def state(self) -> EngineState:
        self._settle()
        state = self._engine.state()
        if self._update is not None:
            taken = [one.take() for one in self._kept.values()]
            numbers = merged_numbers([one for _, one in taken]) if taken else {"state": {}, "groups": []}
            tensors = dict(chain.from_iterable(one.items() for one, _ in taken))
            state = replace(state, optimizer=tensors, numbers={**state.numbers, "optimizer": numbers})
        away = any(shelf.region.memory is None for one in self._slices() for shelf in one.shelves)
        return replace(state, fetch=self._fetch) if away else state

    def load_state(self, state: EngineState) -> None:
        """Slice by slice, so that no more of the model is in memory than while it is trained."""
        self._settle()
        self._check_fit(state)
        keys = self._keys()
        away = {one for slice in self._slices() for one in slice.parameters}
        self._load(state, [key for one, found in keys.items() if one not in away for key in found])
        self._load_optimizer(state, self._shared)
        for name, buffer in module_state(self.module).buffers.items():
            buffer.copy_(state.value(state.buffers[name]))
        for rotation in self._rotations:
            for slice in rotation.tour([Part.WEIGHTS], [Part.WEIGHTS, Part.STATE]):
                self._load(state, [key for one in slice.parameters for key in keys[one]])
                self._load_optimizer(state, slice)
        if self._update is not None and self._trains(state):
            load_scaler(self._update.scaler, state)

    def close(self) -> None:
        self._engine.close()
        self._away.close()

    def _slices(self) -> Iterator[Slice]:
        return (slice for rotation in self._rotations for slice in rotation.slices.values())

    def _groups(self) -> Iterator[Slice | Group]:
        yield from self._slices()
        yield self._shared

    def _make_update(self, objective: Objective, device: torch.device) -> SliceUpdate | None:
        make = objective.optimizer
        if make is None:
            return None
        check_optimizer(make)
        for group in self._groups():
            if group.trained:
                group.optimizer = make(group.trained)
        update = SliceUpdate(
            [one for one in self.module.parameters() if one.requires_grad],
            self._shared,
            lambda parts, changed: (
                slice for rotation in self._rotations for slice in rotation.tour(parts, changed)
            ),
            clip_grad_norm=objective.clip_grad_norm,
            scale_loss=objective.precision == "fp16",
            device=device,
        )
        for rotation in self._rotations:
            rotation.completion = update
        return update

    def _optimizer_states(self, objective: Objective) -> dict[int, OptimizerState]:
        if objective.optimizer is None:
            return {}
        outlines = OptimizerStateShapes(objective.optimizer)
        return {
            id(group): self._optimizer_state(group, outlines) for group in self._groups() if group.optimizer
        }

    def _optimizer_state(self, group: Slice | Group, outlines: OptimizerStateShapes) -> OptimizerState:
        assert group.optimizer is not None, "asked of groups that are trained"
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return OptimizerState(group.optimizer, {one: names[one] for one in group.trained}, outlines)

    def _keys(self) -> dict[Tensor, list[str]]:
        """The names each parameter and buffer has in a state_dict."""
        found: dict[Tensor, list[str]] = {}
        for key, tensor in self.module.state_dict(keep_vars=True).items():
            found.setdefault(tensor, []).append(key)
        return found

    def _check_fit(self, state: EngineState) -> None:
        check_state(self.module, state)
        trained = {name for name, one in self.module.named_parameters() if one.requires_grad}
        kept = {path.rpartition("/")[0] for path in state.optimizer}
        if self._trains(state) and (wrong := kept - trained):
            raise RunError(f"does not fit the model: it trains no {', '.join(sorted(wrong)[:5])}")

    def _trains(self, state: EngineState) -> bool:
        """Whether the optimizer's part of a state is loaded."""
        return self._update is not None and not state.resets_optimizer

    def _load(self, state: EngineState, keys: Sequence[str]) -> None:
        try:
            self.module.load_state_dict({key: state.value(state.model[key]) for key in keys}, strict=False)
        except RuntimeError as error:
            raise RunError(f"does not fit the model: {' '.join(str(error).split())}") from error

    def _load_optimizer(self, state: EngineState, group: Slice | Group) -> None:
        kept = self._kept.get(id(group))
        if kept is None or not self._trains(state):
            return
        names = {name for name, one in self.module.named_parameters() if one in set(group.trained)}
        tensors = {
            path: state.value(one)
            for path, one in state.optimizer.items()
            if path.rpartition("/")[0] in names
        }
        kept.put(tensors, _of_names(state.numbers.get("optimizer", {}), names))

    def _fetch(self, tensor: Tensor) -> Tensor:
        """What a tensor of the state stands for."""
        found = (shelf.get(tensor) for slice in self._slices() for shelf in slice.shelves)
        return next((one for one in found if one is not None), tensor)

    def _settle(self) -> None:
        for rotation in self._rotations:
            rotation.settle()

    def _transfers(self) -> Transfers:
        movers = [rotation.mover for rotation in self._rotations]
        return Transfers(sum(one.moved_bytes for one in movers), sum(one.waited_seconds for one in movers))


def _of_names(numbers: Mapping[str, Any], names: set[str]) -> Mapping[str, Any]:
    state = numbers.get("state")
    if not isinstance(state, dict):  # whoever loads it will say what is wrong
        return numbers
    return {**numbers, "state": {name: values for name, values in state.items() if name in names}}
