"""The engine of an offloaded model: a `PipeEngine` whose parameters come to the device slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.device_errors import is_out_of_memory
from gpipe_cli.engines.pipe_engine import PipeEngine, load_scaler
from gpipe_cli.engines.protocol import Batch, EngineSpec, StepFacts, TrainingObjective
from gpipe_cli.engines.state import (
    EngineState,
    OptimizerState,
    check_optimizer,
    check_state,
    merged_numbers,
    module_state,
)
from gpipe_cli.engines.step_meter import StepMeter
from gpipe_cli.engines.update import ResidentParameters, SliceUpdate
from gpipe_cli.engines.weight_average import exchange_weights, is_averaging, without_averages
from gpipe_cli.errors import RunError
from gpipe_cli.offload.prefetcher import SlicePrefetcher
from gpipe_cli.offload.sizing import boundary_bytes, layer_bytes, optimizer_bytes
from gpipe_cli.offload.slices import ALL_WEIGHTS, Part, Slice, SlicedParameters, put_parameters_on
from gpipe_cli.offload.tiers import CpuTier, DiskTier, Tier
from gpipe_cli.offload.transfers import Transfers
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.pytree import ModelInput
from gpipe_cli.schedule.action import checkpoint_stops


@final
@dataclass(frozen=True)
class OffloadedParameters:
    tier: Tier
    prefetchers: Sequence[SlicePrefetcher]
    """One per worker."""
    shared: Sequence[nn.Parameter]
    """Parameters of several slices, which stay on the device."""

    def close(self) -> None:
        """End the threads that move slices; calling it twice is fine."""
        for prefetcher in self.prefetchers:
            prefetcher.close()
        self.tier.close()


def offload_layers(
    to: str, spec: EngineSpec, workers: Sequence[int], *, buffers: int = 2, in_background: bool = True
) -> OffloadedParameters:
    """Move the parameters of every slice to a tier, and give each worker what brings them back.

    workers: for each slice of `spec.balance`, which of the devices runs it.
    """
    assert spec.make_sample is not None, "an engine that offloads needs to know the sizes of activations"
    module, balance, devices = spec.module, spec.balance, spec.devices
    tier = CpuTier(devices) if to == "cpu" else DiskTier(spec.scratch)
    # Space for the whole training state is reserved before a parameter moves, so a disk that is too small fails with
    # the model still intact, and not in a step.
    nbytes = sum(layer_bytes(module)) + sum(trained_bytes(spec))
    if to != "cpu":  # the file has the inputs from which slices are recomputed too
        recomputed = checkpoint_stops(spec.checkpoint, len(balance), spec.chunks)
        nbytes += boundary_bytes(module, balance, recomputed, spec.make_sample)
    tier.reserve(nbytes)
    value_of = put_parameters_on(devices[0], module)
    parameters = SlicedParameters.of(module, balance)
    parameters.place_shared([devices[worker] for worker in workers], value_of)
    slices = parameters.store(tier, value_of)
    prefetchers = []
    for worker, device in enumerate(devices):
        own = {index: slices[index] for index, owner in enumerate(workers) if owner == worker}
        prefetchers.append(SlicePrefetcher(own, tier, device, buffers=buffers, in_background=in_background))
    return OffloadedParameters(tier, prefetchers, list(parameters.shared))


def update_waits(objective: TrainingObjective) -> bool:
    """Whether the update waits for the gradients of all slices, which are stored until then."""
    return objective.clip_grad_norm is not None or objective.precision == "fp16"


def trained_bytes(spec: EngineSpec) -> list[int]:
    """For each layer the bytes that training stores in addition to its weights."""
    states = optimizer_bytes(spec.module, spec.objective.optimizer)
    if not update_waits(spec.objective):
        return states
    gradients = layer_bytes(spec.module, trained_only=True)
    return [state + own for state, own in zip(states, gradients, strict=True)]


@final
class OffloadEngine:
    def __init__(
        self,
        pipe: Pipe,
        spec: EngineSpec,
        offloaded: OffloadedParameters,
        meter: StepMeter,
        *,
        input_device: torch.device,
        output_device: torch.device,
        memory_cure: str,
    ) -> None:
        self.module = spec.module
        self._referenced = spec.referenced
        self._prefetchers = offloaded.prefetchers
        self._offloaded = offloaded
        self._shared = ResidentParameters(
            [parameter for parameter in offloaded.shared if parameter.requires_grad]
        )
        self._update = self._make_update(spec.objective, output_device)
        self._optimizer_states = self._make_optimizer_states(spec.objective)
        self._averages = any(group.optimizer and is_averaging(group.optimizer) for group in self._groups())
        self._uses_averages = False
        self._wait_before_update: Callable[[], None] = lambda: None
        self._engine = PipeEngine(
            pipe,
            # Each slice has its own optimizer; one of the whole model would want all of its state in memory at once.
            replace(spec, objective=replace(spec.objective, optimizer=None)),
            input_device=input_device,
            output_device=output_device,
            update=self._update,
            meter=meter,
            memory_cure=memory_cure,
        )

    def train_step(self, batch: Batch, key: int, lr: float, *, measure: bool = True) -> StepFacts:
        assert self._update is not None, "an engine without an optimizer cannot train"
        before = self._transfers()
        self._wait_before_update()  # slices are updated in the middle of the step
        self._use_averages(False)
        # Before the step: a slice is updated as soon as its backward is done, in the middle of it.
        self._update.lr = lr
        facts = self._engine.train_step(batch, key, lr, measure=measure)
        return replace(facts, transfers=self._transfers().since(before))

    def eval_step(self, batch: Batch) -> StepFacts:
        self._use_averages(True)
        return self._engine.eval_step(batch)

    def predict(self, input: ModelInput, choose: Callable[[Any], Tensor]) -> Tensor:
        self._use_averages(True)
        return self._engine.predict(input, choose)

    def peak_bytes(self) -> list[int | None]:
        return self._engine.peak_bytes()

    def before_update(self, wait: Callable[[], None]) -> None:
        self._wait_before_update = wait

    def state(self) -> EngineState:
        self._use_averages(True)
        # Stores run in the background: only now does the tier hold the values of the last step.
        for prefetcher in self._prefetchers:
            prefetcher.wait_until_stored()
        state = self._engine.state()
        if self._update is not None:
            states = [state.take() for state in self._optimizer_states.values()]
            numbers = merged_numbers([own for _, own in states]) if states else {"state": {}, "groups": []}
            tensors = dict(chain.from_iterable(own.items() for own, _ in states))
            state = replace(state, optimizer=tensors, numbers={**state.numbers, "optimizer": numbers})
        away = any(stored.has_placeholders for slice in self._slices() for stored in slice.all_stored)
        return replace(state, fetch=self._fetch) if away else state

    def load_state(self, state: EngineState) -> None:
        """Load slice by slice, so that no more of the model is in memory than while it trains."""
        if self._loads_optimizer(state) and not self._averages:
            state = without_averages(state, self.module)
        # Everything is checked before the first tensor is written.
        self._check_fit(state)
        keys = self._keys(state)
        offloaded = {parameter for slice in self._slices() for parameter in slice.parameters}
        self._load(state, [key for tensor, own in keys.items() if tensor not in offloaded for key in own])
        self._load_optimizer(state, self._shared)
        for name, buffer in module_state(self.module).buffers.items():
            buffer.copy_(state.value(state.buffers[name]))
        frozen = any(keys[parameter] for slice in self._slices() for parameter in slice.frozen)
        parts = ALL_WEIGHTS if frozen else (Part.WEIGHTS,)
        for prefetcher in self._prefetchers:
            # The optimizer state is stored but not loaded, because all of it is replaced.
            for slice in prefetcher.tour(parts, [*parts, Part.STATE]):
                self._load(state, [key for parameter in slice.parameters for key in keys[parameter]])
                self._load_optimizer(state, slice)
        if self._update is not None and self._loads_optimizer(state):
            load_scaler(self._update.scaler, state)
            self._uses_averages = self._averages

    def close(self) -> None:
        # The pipe's workers first: they submit copies to the prefetchers' threads.
        self._engine.close()
        self._offloaded.close()

    def _use_averages(self, use: bool) -> None:
        """As in `PipeEngine`, slice by slice."""
        if not self._averages or self._uses_averages == use:
            return
        parts = (Part.WEIGHTS, Part.STATE)
        for prefetcher in self._prefetchers:
            for slice in prefetcher.tour(parts, parts):
                exchange_weights(slice.optimizer)
        exchange_weights(self._shared.optimizer)
        self._uses_averages = use

    def _slices(self) -> Iterator[Slice]:
        return (slice for prefetcher in self._prefetchers for slice in prefetcher.slices.values())

    def _groups(self) -> Iterator[Slice | ResidentParameters]:
        yield from self._slices()
        yield self._shared

    def _make_update(self, objective: TrainingObjective, device: torch.device) -> SliceUpdate | None:
        make = objective.optimizer
        if make is None:
            return None
        check_optimizer(make)
        names = self._names()
        for group in self._groups():
            if group.trained:
                group.optimizer = make([(names[parameter], parameter) for parameter in group.trained])
        update = SliceUpdate(
            [parameter for parameter in self.module.parameters() if parameter.requires_grad],
            self._shared,
            lambda parts, changed: (
                slice for prefetcher in self._prefetchers for slice in prefetcher.tour(parts, changed)
            ),
            clip_grad_norm=objective.clip_grad_norm,
            scale_loss=objective.precision == "fp16",
            device=device,
        )
        for prefetcher in self._prefetchers:
            prefetcher.completion = update
        return update

    def _make_optimizer_states(self, objective: TrainingObjective) -> dict[int, OptimizerState]:
        if objective.optimizer is None:
            return {}
        names = self._names()
        return {
            id(group): OptimizerState(
                group.optimizer,
                {parameter: names[parameter] for parameter in group.trained},
                objective.optimizer,
            )
            for group in self._groups()
            if group.optimizer
        }

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def _keys(self, state: EngineState) -> dict[Tensor, list[str]]:
        """The names in the state of each parameter and buffer; none for those that the state leaves out."""
        keys: dict[Tensor, list[str]] = {}
        for key, tensor in self.module.state_dict(keep_vars=True).items():
            keys.setdefault(tensor, []).extend([key] if key in state.model else [])
        return keys

    def _check_fit(self, state: EngineState) -> None:
        check_state(self.module, state, self._referenced)
        trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        saved = {path.rpartition("/")[0] for path in state.optimizer}
        if self._loads_optimizer(state) and (unknown := saved - trained):
            raise RunError(f"does not fit the model: it trains no {', '.join(sorted(unknown)[:5])}")

    def _loads_optimizer(self, state: EngineState) -> bool:
        return self._update is not None and not state.resets_optimizer

    def _load(self, state: EngineState, keys: Sequence[str]) -> None:
        try:
            self.module.load_state_dict({key: state.value(state.model[key]) for key in keys}, strict=False)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise RunError(f"does not fit the model: {' '.join(str(error).split())}") from error

    def _load_optimizer(self, state: EngineState, group: Slice | ResidentParameters) -> None:
        optimizer_state = self._optimizer_states.get(id(group))
        if optimizer_state is None or not self._loads_optimizer(state):
            return
        trained = set(group.trained)
        names = {name for name, parameter in self.module.named_parameters() if parameter in trained}
        tensors = {
            path: state.value(tensor)
            for path, tensor in state.optimizer.items()
            if path.rpartition("/")[0] in names
        }
        optimizer_state.put(tensors, _of_names(state.numbers.get("optimizer", {}), names))

    def _fetch(self, tensor: Tensor) -> Tensor:
        """Read the value of a tensor of the state, which itself may have no storage."""
        values = (stored.get(tensor) for slice in self._slices() for stored in slice.all_stored)
        return next((value for value in values if value is not None), tensor)

    def _transfers(self) -> Transfers:
        transfers = [prefetcher.worker.transfers for prefetcher in self._prefetchers]
        return Transfers(
            sum(own.moved_bytes for own in transfers), sum(own.waited_seconds for own in transfers)
        )


def _of_names(numbers: Mapping[str, Any], names: set[str]) -> Mapping[str, Any]:
    state = numbers.get("state")
    if not isinstance(state, dict):  # OptimizerState.put rejects it with a precise message
        return numbers
    return {**numbers, "state": {name: values for name, values in state.items() if name in names}}
