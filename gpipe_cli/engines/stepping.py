"""A step on a pipe: the engine behind all others, which differ in their pipe and in whom they share the work with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor, nn

from gpipe_cli.engines.collectives import Collectives, SingleProcess
from gpipe_cli.engines.memory import memory_watched
from gpipe_cli.engines.nonfinite import described, first_nonfinite_output, nonfinite_gradients
from gpipe_cli.engines.protocol import Batch, Objective, StepFacts, Value
from gpipe_cli.engines.state import EngineState, OptimizerState, check_optimizer, load_module, module_state
from gpipe_cli.engines.state_check import check_scaler
from gpipe_cli.engines.update import Update, UpdateFacts
from gpipe_cli.engines.utilisation import Gauge
from gpipe_cli.errors import NumericError
from gpipe_cli.profiling.optimizer_state import OptimizerStateShapes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Pipe(Protocol):
    """What `GPipe`, `PlainPipe` and `RankPipe` have in common. Of those that share the work with other processes
    only one gives the output; the others give ()."""

    chunks: int
    training: bool

    def __call__(self, input: Any) -> Any: ...
    def step(
        self, input: Any, target: Any, loss_fn: Any, key: int | None = None, *, return_output: Literal[True]
    ) -> tuple[Tensor, Any]: ...
    def train(self, mode: bool = True) -> Any: ...
    def close(self) -> None: ...


class Updating(Protocol):
    """What becomes of gradients: `Update`, or one that has seen to most of it during the step."""

    scaler: torch.amp.GradScaler

    def begin(self) -> None: ...
    def apply(self, loss: float, lr: float) -> UpdateFacts: ...


@final
class PipeEngine:
    def __init__(
        self,
        pipe: Pipe,
        module: nn.Sequential,
        objective: Objective,
        *,
        balance: Sequence[int],
        first: torch.device,
        last: torch.device,
        eval_chunks: int,
        collectives: Collectives | None = None,
        update: Updating | None = None,
        gauge: Gauge | None = None,
    ) -> None:
        """update: made here from the objective where none is given; its state is then seen to here as well."""
        self.module = module
        self._gauge = gauge
        self._collectives = collectives or SingleProcess()
        self._pipe = pipe
        # Once: an evaluation puts every module back, and to tell each of them costs a small model's step dearly.
        pipe.train()
        self._objective = objective
        self._balance = balance
        self._first, self._last = first, last
        self._eval_chunks = eval_chunks
        # torch makes no optimizer of nothing, which is what a process may have whose layers have no parameters.
        self._placeholder = nn.Parameter(torch.zeros(0))
        own = self._make_update() if update is None else None
        self._update: Updating | None = own if update is None else update
        self._kept = None if own is None else self._optimizer_state(own)
        # One function for all steps: a pipe remembers whether the last one draws.
        self._scaled_loss = None if self._update is None else _scaled(self._loss, self._update.scaler)

    def train_step(self, batch: Batch, key: int, lr: float) -> StepFacts:
        assert self._update is not None, "an engine without an optimizer cannot train"
        input, target = self._place(batch)
        self._update.begin()
        with nullcontext() if self._gauge is None else self._gauge.reading():
            scaled, output = self._step(input, target, key)
        loss = float(scaled) / self._update.scaler.get_scale()
        seen = self._collectives.facts(self._facts(loss, output, target))
        try:
            with memory_watched():
                facts = self._update.apply(seen.loss, lr)
        except NumericError as error:
            for note in self._trace_back(input, target, key):
                error.add_note(note)
            raise
        load = None if self._gauge is None else self._gauge.last
        return replace(seen, grad_norm=facts.grad_norm, skipped=facts.skipped, utilisation=load)

    def _facts(self, loss: float, output: Any, target: Tensor) -> StepFacts | None:
        if isinstance(output, tuple) and not output:
            return None
        return StepFacts(loss, len(target), self._objective.measure(output, target))

    def _step(self, input: Value, target: Tensor, key: int) -> tuple[Tensor, Any]:
        with self._autocast(), memory_watched():
            return self._pipe.step(input, target, self._scaled_loss, key=key, return_output=True)

    def _trace_back(self, input: Value, target: Tensor, key: int) -> Iterator[str]:
        """Where a loss or gradient that is not finite came from."""
        gradient = self._collectives.last_name(nonfinite_gradients(self.module))
        found = first_nonfinite_output(self.module, lambda: self._step(input, target, key))
        place = self._collectives.first_nonfinite_output(found)
        if place is not None:
            yield f"first output that is not finite: {described(self.module, self._balance, place)}"
        elif gradient is not None:
            yield f"all layers' outputs are finite; first gradient that is not: {gradient}"

    def eval_step(self, batch: Batch) -> StepFacts:
        input, target = self._place(batch)
        with self._evaluating(), self._autocast(), memory_watched():
            output = self._pipe(input)
            share = self._collectives.share_of(len(target))
            nothing = isinstance(output, tuple) and not output
            loss = 0.0 if nothing else float(self._loss(output, target)) * share
        return self._collectives.facts(self._facts(loss, output, target))

    def state(self) -> EngineState:
        return self._collectives.gather_state(self._own_state())

    def _own_state(self) -> EngineState:
        state = module_state(self.module)
        if self._update is None:
            return state
        tensors, numbers = ({}, {}) if self._kept is None else self._kept.take()
        scaler = self._update.scaler.state_dict()
        return replace(state, optimizer=tensors, numbers={"optimizer": numbers, "scaler": scaler})

    def load_state(self, state: EngineState) -> None:
        load_module(self.module, state)
        if self._update is None or state.resets_optimizer:
            return
        if self._kept is not None:
            self._kept.put(state.optimizer, state.numbers.get("optimizer", {}))
        load_scaler(self._update.scaler, state)

    def close(self) -> None:
        self._pipe.close()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Eval mode, and nothing that training could notice afterwards: not even the default generator moves.

        A pipe that is called draws its key from that generator; here it is the same one for every batch.
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

    def _make_update(self) -> Update | None:
        make = self._objective.optimizer
        if make is None:
            return None
        check_optimizer(make)
        # Those on the meta device are in other processes.
        parameters = [one for one in self.module.parameters() if one.requires_grad and not one.is_meta]
        return Update(
            make(parameters or [self._placeholder]),
            parameters,
            clip_grad_norm=self._objective.clip_grad_norm,
            scale_loss=self._objective.precision == "fp16",
            device=self._last,
            collectives=self._collectives,
        )

    def _optimizer_state(self, update: Update) -> OptimizerState:
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        assert self._objective.optimizer is not None, "an update has been made of it"
        outlines = OptimizerStateShapes(self._objective.optimizer)
        return OptimizerState(update.optimizer, {**names, self._placeholder: ""}, outlines)

    def _loss(self, output: Any, target: Tensor) -> Tensor:
        # Autocast leaves scores in half precision; a loss summed there would lose most of its digits.
        return self._objective.loss(_float(output), target)

    def _place(self, batch: Batch) -> tuple[Value, Tensor]:
        input, target = batch
        moved = (
            tuple(one.to(self._first, non_blocking=True) for one in input)
            if isinstance(input, tuple)
            else input.to(self._first, non_blocking=True)
        )
        return moved, target.to(self._last, non_blocking=True)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = DTYPES.get(self._objective.precision)
        return nullcontext() if dtype is None else torch.autocast(self._first.type, dtype=dtype)


def load_scaler(scaler: torch.amp.GradScaler, state: EngineState) -> None:
    saved = state.numbers.get("scaler", {})
    if saved != {} and scaler.is_enabled():  # a run may go on in another precision
        check_scaler(scaler.state_dict(), saved)
        scaler.load_state_dict(saved)


def _scaled(
    loss: Callable[[Any, Tensor], Tensor], scaler: torch.amp.GradScaler
) -> Callable[[Any, Tensor], Tensor]:
    return lambda output, target: scaler.scale(loss(output, target))


def _float(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.float() if output.dtype in DTYPES.values() else output
    if isinstance(output, dict):
        return {name: _float(one) for name, one in output.items()}
    return tuple(_float(one) for one in output)
