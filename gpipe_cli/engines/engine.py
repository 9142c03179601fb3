"""The engine: one training or evaluation step on a pipe, its loss, and what is recorded of it.

Engines differ in their pipe and in the processes they share the work with. When a loss or gradient is not finite, the
engine runs the failed step again to name the layer it came from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.device_errors import EVAL_HINT, STEP_HINT, report_out_of_memory
from gpipe_cli.accelerator.devices import peak_bytes, reset_peaks
from gpipe_cli.accelerator.streams import synchronize
from gpipe_cli.distributed.replicas import ParameterShards
from gpipe_cli.engines.collectives import Collectives, NonfiniteOutput
from gpipe_cli.engines.parameters import EngineParameters, OffloadedParameters
from gpipe_cli.engines.protocol import DTYPES, Batch, BatchResult, EngineSpec, TrainingObjective, Utilization
from gpipe_cli.engines.state import EngineState, check_scaler
from gpipe_cli.engines.update import Update
from gpipe_cli.errors import NumericError
from gpipe_cli.pipeline.context import current_microbatch, is_recomputing
from gpipe_cli.pipeline.loss import called_modules, row_weights
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.profiling.timeline import StepTimeline, recording
from gpipe_cli.pytree import ModelInput, map_tensors
from gpipe_cli.sequential import layer_class, layer_names
from gpipe_cli.values import FACTORS

RECORDED_STEP = 3
"""The step of an engine that is recorded: after a few that warm up, but early enough for a short run."""


@final
class PipelineEngine:
    def __init__(
        self,
        pipe: Pipe,
        spec: EngineSpec,
        *,
        offloaded: OffloadedParameters | None = None,
        collectives: Collectives | None = None,
        shards: ParameterShards | None = None,
        meter: StepMeter | None = None,
        memory_hint: str = STEP_HINT,
    ) -> None:
        """shards: None if this process updates all its parameters.
        memory_hint: what to try if memory runs out in a training step.
        """
        self.module = spec.module
        self._referenced = spec.referenced
        self._pipe = pipe
        # Only here, not in every step: an evaluation restores the mode of every module, and setting it again would
        # take a noticeable part of a small model's step.
        pipe.train()
        pipe.least_rows = spec.least_rows
        if spec.log_layers:
            pipe.log_layers()
        self._objective, self._balance, self._eval_chunks = spec.objective, spec.balance, spec.eval_chunks
        devices = list(pipe.partition_devices.values())
        self._input_device, self._output_device = devices[0], devices[-1]
        self._devices = spec.devices
        reset_peaks(self._devices)
        self._memory_hint = memory_hint
        self._collectives = collectives or Collectives.alone(spec.module, self._output_device)
        self._meter = meter
        self._offloaded = offloaded
        objective = spec.objective
        self._parameters = EngineParameters(
            spec.module, objective.optimizer, offloaded=offloaded, shards=shards
        )
        self._wait_before_update: Callable[[], None] = lambda: None
        self._update: Update | None = None
        if objective.optimizer is not None:
            self._update = Update(
                self._parameters,
                clip_grad_norm=objective.clip_grad_norm,
                scale_loss=objective.precision == "fp16",
                device=self._output_device,
                collectives=self._collectives,
            )
        # One function object for all steps: a pipe remembers whether the last loss function drew random numbers.
        self._training_loss = (
            None
            if self._update is None
            else TrainingLoss(self._objective, self._update.scaler, self._output_device)
        )
        self._evaluation_loss: TrainingLoss | None = None
        """For evaluations of one micro-batch at a time."""
        if spec.loss_by_micro_batch:
            unscaled = torch.amp.GradScaler(enabled=False)
            self._evaluation_loss = TrainingLoss(self._objective, unscaled, self._output_device)

    def train_step(self, batch: Batch, key: int, lr: float, *, measure: bool = True) -> BatchResult:
        self._use_averages(False)
        offloaded = self._offloaded
        before = None if offloaded is None else offloaded.transfers
        if before is not None:
            self._wait_before_update()  # slices are updated in the middle of the step
        with self._reports_out_of_memory("", self._memory_hint):
            facts = self._train_step(batch, key, lr, measure)
        if offloaded is None or before is None:
            return facts
        return replace(facts, transfers=offloaded.transfers.since(before))

    def _train_step(self, batch: Batch, key: int, lr: float, measure: bool) -> BatchResult:
        assert self._update is not None and self._training_loss is not None, (
            "an engine without an optimizer cannot train"
        )
        weights = row_weights(self._objective.loss, batch[1], len(batch[1]))
        input, target = self._to_devices(batch)
        self._update.begin(lr, key)
        self._training_loss.begin(weights, measure=measure)
        meter = self._meter
        with nullcontext() if meter is None else meter.next_step(measured=measure):
            scaled = self._step(input, target, key)
        # float() waits for the device. Scales are powers of two, so the division is exact.
        loss = float(scaled) / self._update.scaler.get_scale()
        # Only the last rank has a loss, but all have to judge it: either every rank updates or every rank raises.
        sums = self._training_loss.sums
        own = None if sums is None else BatchResult(loss, len(target), sums, float(weights.sum()))
        with self._reports_out_of_memory("updating the parameters", self._memory_hint):
            facts, norms = self._collectives.result_and_norms(own, self._update.norms(), measured=measure)
        self._wait_before_update()
        try:
            with self._reports_out_of_memory("updating the parameters", self._memory_hint):
                facts = self._update.apply(facts, norms)
        except NumericError as error:
            # All ranks are here, since loss and norms are equal in all of them: the collectives below find their
            # partners.
            for note in self._nonfinite_notes(input, target, key):
                error.add_note(note)
            raise
        if measure:
            # The update is only queued, and the training loop takes the time when this call returns.
            synchronize(self._devices)
        if meter is None:
            return facts
        return replace(facts, utilization=meter.utilization, timeline=meter.timeline)

    def _step(self, input: ModelInput, target: Tensor, key: int) -> Tensor:
        assert self._training_loss is not None, "only an engine with an optimizer runs steps"
        with self._autocast():
            return self._pipe.step(input, target, self._training_loss, key=key)

    def _nonfinite_notes(self, input: ModelInput, target: Tensor, key: int) -> Iterator[str]:
        """Where a loss or gradient that is not finite came from.

        Randomness is keyed, so running the step again repeats it. Training ends here, so it does no harm that the
        second run changes buffers and gradients.
        """
        # Before the step runs again, which adds to the gradients.
        gradient = self._collectives.last_parameter_name(nonfinite_gradients(self.module))
        own = first_nonfinite_output(self.module, lambda: self._step(input, target, key))
        output = self._collectives.first_nonfinite_output(own)
        if output is not None:
            index, micro_batch = output
            name, partition = (
                layer_names(self.module)[index],
                bisect_right(list(accumulate(self._balance)), index),
            )
            layer = f"layer '{name}' ({layer_class(self.module[index])}) in partition {partition}"
            yield f"first output that is not finite: {layer}, micro-batch {micro_batch}"
        elif gradient is not None:
            yield f"all layers' outputs are finite; first gradient that is not: {gradient}"

    def eval_step(self, batch: Batch) -> BatchResult:
        self._use_averages(True)
        with self._reports_out_of_memory("evaluating", EVAL_HINT):
            return self._eval_step(batch)

    def _eval_step(self, batch: Batch) -> BatchResult:
        weights = row_weights(self._objective.loss, batch[1], len(batch[1]))
        weight = float(weights.sum())
        input, target = self._to_devices(batch)
        if self._evaluation_loss is not None:
            return self._eval_micro_batches(self._evaluation_loss, input, target, weights)
        with self._evaluating(), self._autocast():
            output = self._pipe(input)
            # A collective, so it is called by ranks without an output too.
            share = self._collectives.fraction_of(weight)
            has_output = _has_output(output)
            # The mean of nothing may be nan.
            has_loss = has_output and weight > 0
            loss = float(unscaled_loss(self._objective, output, target)) * share if has_loss else 0.0
        own = None
        if has_output:
            own = BatchResult(loss, len(target), self._objective.measure(output, target), weight)
            if self._objective.observe is not None:
                self._objective.observe(output, target)
        return self._collectives.result(own, measured=True)

    def _eval_micro_batches(
        self, loss: TrainingLoss, input: ModelInput, target: Tensor, weights: Tensor
    ) -> BatchResult:
        """Loss and measures where the last partition runs, one micro-batch at a time."""
        loss.begin(weights, measure=True)
        with self._evaluating(), self._autocast():
            total = float(self._pipe.loss(input, target, loss))
        weight = float(weights.sum())
        share = self._collectives.fraction_of(weight)
        own = None if loss.sums is None else BatchResult(total * share, len(target), loss.sums, weight)
        return self._collectives.result(own, measured=True)

    def predict(self, input: ModelInput, choose: Callable[[Any], Tensor]) -> Tensor:
        self._use_averages(True)
        with self._reports_out_of_memory("predicting", EVAL_HINT):
            with self._evaluating(), self._autocast():
                output = self._pipe(self._to_input_device(input))
            return self._collectives.from_last_rank(choose(output) if _has_output(output) else None)

    def state(self) -> EngineState:
        self._use_averages(True)
        state = self._parameters.state(self._referenced)
        if self._update is not None:
            numbers = {**state.numbers, "scaler": self._update.scaler.state_dict()}
            state = replace(state, numbers=numbers)
        # The last update may still be queued, and the thread that writes a snapshot may use other streams.
        synchronize(self._devices)
        return self._collectives.saved_part(state)

    def load_state(self, state: EngineState) -> None:
        self._parameters.load(state, self._referenced)
        saved = state.numbers.get("scaler", {})
        if self._update is None or state.resets_optimizer or saved == {}:
            return
        scaler = self._update.scaler
        if scaler.is_enabled():  # a run may resume in another precision
            check_scaler(scaler.state_dict(), saved)
            scaler.load_state_dict(saved)

    def _use_averages(self, use: bool) -> None:
        """With `ema`, evaluate and save the averages of the weights; the weights of the training take their place."""
        if self._parameters.must_exchange(use):
            self._wait_before_update()
            self._parameters.exchange_averages()

    def before_update(self, wait: Callable[[], None]) -> None:
        self._wait_before_update = wait

    def peak_bytes(self) -> list[int | None]:
        return self._collectives.peak_bytes([peak_bytes(device) for device in self._devices])

    def close(self) -> None:
        # The pipe's workers first: they submit copies to the threads that move slices.
        self._pipe.close()
        if self._offloaded is not None:
            self._offloaded.close()

    def _reports_out_of_memory(self, doing: str, hint: str) -> AbstractContextManager[None]:
        return report_out_of_memory(doing, hint, self._pipe.partition_devices)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Run the block in eval mode, and leave nothing behind that training could notice.

        A pipe that is called draws its key from the default generator, so the block gets a seeded copy of it.
        """
        training, chunks = self._pipe.training, self._pipe.chunks
        self._pipe.train(False)
        self._pipe.chunks = self._eval_chunks
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                yield
        finally:
            self._pipe.train(training)
            self._pipe.chunks = chunks

    def _to_devices(self, batch: Batch) -> tuple[ModelInput, Tensor]:
        input, target = batch
        return self._to_input_device(input), target.to(self._output_device, non_blocking=True)

    def _to_input_device(self, input: ModelInput) -> ModelInput:
        moved: ModelInput = map_tensors(
            lambda tensor: tensor.to(self._input_device, non_blocking=True), input
        )
        return moved

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = DTYPES.get(self._objective.precision)
        return nullcontext() if dtype is None else torch.autocast(self._input_device.type, dtype=dtype)


def _has_output(output: Any) -> bool:
    """A process without the last partition gets an empty tuple."""
    return not (isinstance(output, tuple) and not output)


def first_nonfinite_output(module: nn.Sequential, run: Callable[[], object]) -> NonfiniteOutput | None:
    """The first layer, and its first micro-batch, whose output is not finite while `run` runs."""
    nonfinite: list[tuple[int, int]] = []

    def make_hook(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, input: Any, output: Any) -> None:
            # Workers append from their own threads; list.append is atomic.
            micro_batch = current_microbatch()
            if micro_batch is not None and not is_recomputing() and not _is_finite(output):
                nonfinite.append((layer, micro_batch.index))

        return hook

    with ExitStack() as hooks:
        for index, layer in enumerate(module):
            hooks.callback(layer.register_forward_hook(make_hook(index)).remove)
        run()
    return min(nonfinite, default=None)


def nonfinite_gradients(module: nn.Module) -> list[str]:
    """The parameters whose gradient is not finite; backward reached the last of them first."""
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and not _is_finite(parameter.grad)
    ]


def _is_finite(value: Any) -> bool:
    return all(
        bool(torch.isfinite(tensor).all()) for tensor in tensors_of(value) if tensor.is_floating_point()
    )


@final
class TrainingLoss:
    """The loss of a pipe's steps, and what is measured along with it, one micro-batch at a time.

    Only the worker of the last partition calls it. The outputs of a step are never together in memory: the scores of a
    language model for a whole mini-batch would take gigabytes, which no estimate of a partition's memory includes.
    """

    def __init__(
        self, objective: TrainingObjective, scaler: torch.amp.GradScaler, device: torch.device
    ) -> None:
        """device: where outputs and targets are."""
        self._objective, self._scaler, self._device_type = objective, scaler, device.type
        self._measures = False
        self._row_weights = torch.ones(0)
        self._sums: dict[int, Mapping[str, float]] = {}

    def begin(self, row_weights: Tensor, *, measure: bool) -> None:
        """Forget the previous step. row_weights: those of the next target, on the host."""
        self._measures, self._row_weights = measure, row_weights
        self._sums.clear()

    @property
    def sums(self) -> dict[str, float] | None:
        """What the step measured, which may be nothing; None in a process whose partitions have no loss."""
        if not self._sums:
            return None
        # In the order of the micro-batches, which decides the last bits of a sum.
        totals = Counter[str]()
        for _, sums in sorted(self._sums.items()):
            totals.update(sums)
        return dict(totals)

    def row_weights(self, target: Tensor) -> Tensor:
        # Counted before the target moved to its device: counting there, the host would wait for the previous step.
        return self._row_weights

    def modules(self) -> Iterable[nn.Module]:
        return called_modules(self._objective.loss)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        loss = self._scaler.scale(unscaled_loss(self._objective, output, target))
        micro_batch = current_microbatch()
        assert micro_batch is not None, "a pipe calls its loss for a micro-batch"
        if not is_recomputing():
            self._sums[micro_batch.index] = self._measured(output, target) if self._measures else {}
        return loss

    def _measured(self, output: Any, target: Tensor) -> Mapping[str, float]:
        with torch.no_grad():
            if not torch.is_autocast_enabled(self._device_type):
                return self._objective.measure(output, target)
            with torch.autocast(self._device_type, enabled=False):
                return self._objective.measure(output, target)


def unscaled_loss(objective: TrainingObjective, output: Any, target: Tensor) -> Tensor:
    # Under autocast scores are in half precision, in which a sum would lose most of its digits.
    return objective.loss(
        _float(output) if isinstance(output, Tensor) else map_tensors(_float, output), target
    )


def _float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in DTYPES.values() and not hasattr(tensor, FACTORS) else tensor


@final
class StepMeter:
    """Records steps of a pipe: one early step in every run, and how busy the partitions are where somebody watches.

    Recording costs a few percent of a step of small layers, so an unwatched run records no other step.
    """

    def __init__(self, pipe: Pipe, *, watched: bool) -> None:
        """watched: record every step that is measured."""
        self._pipe, self._watched = pipe, watched
        self._steps = 0
        self._last: StepTimeline | None = None

    def next_step(self, *, measured: bool) -> AbstractContextManager[None]:
        """Run the next step in this context, and ask for its facts afterwards."""
        self._steps += 1
        self._last = None
        is_recorded = self._steps == RECORDED_STEP or (self._watched and measured)
        return self._recording() if is_recorded else nullcontext()

    @property
    def timeline(self) -> StepTimeline | None:
        """The last step, if it is the one that every run records."""
        return self._last if self._steps == RECORDED_STEP else None

    @property
    def utilization(self) -> Utilization | None:
        """The utilization in the last step, if the engine records every measured step."""
        step, devices = self._last, self._pipe.partition_devices
        if step is None or not self._watched:
            return None
        return Utilization(
            busy=tuple(step.partition(index).busy for index in devices),
            bubble=step.bubble,
            memory=tuple(map(peak_bytes, devices.values())),
        )

    @contextmanager
    def _recording(self) -> Iterator[None]:
        with recording(self._pipe) as record:
            yield
        self._last = StepTimeline(tuple(record.spans()))
