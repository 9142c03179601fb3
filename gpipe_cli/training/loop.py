"""The training loop: epochs of steps with an evaluation after each or more often, as a generator of facts.

The loop decides order and keys. It knows nothing of files, terminals or how an engine runs a step.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import final

from gpipe_cli.activity import activity
from gpipe_cli.engines.protocol import Batch, BatchResult, Engine, Utilization
from gpipe_cli.errors import DataError, NumericError
from gpipe_cli.offload.transfers import Transfers
from gpipe_cli.profiling.timeline import StepTimeline
from gpipe_cli.training.lr_schedules import LrSchedule
from gpipe_cli.values import lower_is_better

TrainBatches = Callable[[int, int], Iterable[Batch]]
"""(epoch, index of the first batch) -> the mini-batches of that epoch from there on."""
EvalBatches = Callable[[int], Iterable[Batch]]
"""epoch -> the held-out mini-batches."""
_MAX_EXPONENT = 1023.0
"""The exponent of the largest power of two that a float can represent."""


@final
@dataclass(frozen=True)
class PatienceState:
    """How long a run has waited for a better evaluation. Snapshots store it as JSON under these field names."""

    metric: str
    value: float
    """The metric at the last evaluation that was better than those before it."""
    step: int
    """The step of the same evaluation."""
    evaluations: int = 0
    """How many evaluations there were since then."""


@final
@dataclass(frozen=True)
class EarlyStop:
    """When a run whose evaluations no longer improve ends; `save_and_stop` in runs/snapshots ends it."""

    metric: str
    patience: int
    """Evaluations without an improvement after which the run ends."""
    min_delta: float = 0.0
    """An evaluation that is better by this much or less is no improvement."""

    def after(self, value: float, step: int, state: PatienceState | None) -> PatienceState:
        """Count an evaluation; `state` is the result of the previous call, if any."""
        if state is None or state.metric != self.metric:
            return PatienceState(self.metric, value, step)
        gain = state.value - value if lower_is_better(self.metric) else value - state.value
        if gain > self.min_delta:
            return PatienceState(self.metric, value, step)
        return replace(state, evaluations=state.evaluations + 1)

    def reason(self, state: PatienceState | None) -> str | None:
        """Why the run ends now, if it does."""
        if state is None or state.metric != self.metric or state.evaluations < self.patience:
            return None
        evaluations = f"{state.evaluations} evaluation{'s' if state.evaluations > 1 else ''}"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return f"{evaluations} without a {self.metric} better than {state.value:.4g} (step {state.step}){by}"


@final
@dataclass(frozen=True)
class TrainSpec:
    """How many steps to train, at which learning rate, and which of them to measure."""

    steps: int
    steps_per_epoch: int
    lr: float
    lr_schedule: LrSchedule
    seed: int
    measure_every: int = 1
    """Steps between two whose metrics are computed. Only their time is exact: the others return while a device may
    still work on them, because waiting for it in every step would leave it idle between steps."""
    eval_batches: int | None = None
    """How many mini-batches an evaluation has, if that is known; only for display."""
    eval_every: int | None = None
    """Steps between two evaluations."""
    eval_epochs: bool = True
    """Whether there is one after each epoch. If there are any, the last step has one."""
    early_stop: EarlyStop | None = None

    @property
    def evaluations(self) -> int:
        """How many there are at most."""
        between = 0 if self.eval_every is None else self.steps // self.eval_every + 1
        return between + (self.epochs if self.eval_epochs else 0)

    @property
    def epochs(self) -> int:
        return -(-self.steps // self.steps_per_epoch)

    def lr_at(self, step: int) -> float:
        return self.lr * self.lr_schedule.factor(step, self.steps)

    def evaluates_after(self, step: int) -> bool:
        every = self.eval_every
        between = every is not None and (step % every == 0 or step == self.steps)
        return step > 0 and (between or (self.eval_epochs and self.ends_epoch(step)))

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch, or the run, ends after this many steps."""
        return step % self.steps_per_epoch == 0 or step == self.steps

    def stops_early(self, step: int, patience: PatienceState | None) -> str | None:
        """Why a run ends after this step, before its last one, if it does."""
        if self.early_stop is None or step == self.steps:
            return None
        return self.early_stop.reason(patience)

    def is_done(self, position: Position, patience: PatienceState | None) -> bool:
        """Whether a run that has come so far ends there, with its evaluation if it has one."""
        if self.evaluates_after(position.step) and not position.evaluated:
            return False
        stops = position.evaluated and self.stops_early(position.step, patience) is not None
        return stops or position.step == self.steps

    def measures(self, step: int) -> bool:
        """Whether the metrics of this step, counted from 1, are computed and recorded.

        The first step shows where the loss started; the last one before an evaluation can be compared with it.
        """
        return step in (1, self.steps) or step % self.measure_every == 0 or self.evaluates_after(step)


@final
@dataclass(frozen=True)
class LossWindow:
    """Mean and extremes of the training loss over the steps since the last measured one.

    Every step computes its loss anyway, so the window costs nothing. Snapshots store it as JSON under these field
    names, so that a resumed run records the same rows as one that never stopped.
    """

    steps: int = 0
    total: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def after(self, loss: float) -> LossWindow:
        if self.steps == 0:
            return LossWindow(1, loss, loss, loss)
        return LossWindow(self.steps + 1, self.total + loss, min(self.low, loss), max(self.high, loss))

    @property
    def mean(self) -> float:
        return self.total / self.steps


@final
@dataclass(frozen=True)
class StepResult:
    """The facts of one training step."""

    step: int
    epoch: int
    loss: float
    window: LossWindow
    """The losses since the last measured step, this one included."""
    measured: bool
    means: dict[str, float]
    """Empty if the step was not measured."""
    lr: float
    samples: int
    grad_norm: float | None
    skipped: bool
    seconds: float
    """Training time since step 0, across resumes."""
    transfers: Transfers | None = None
    """Copies of an engine that moves the model to and from its device; None for other engines."""
    utilization: Utilization | None = None
    timeline: StepTimeline | None = None
    """The timeline of the step, if it is the one that the engine recorded."""
    lost_updates: float | None = None
    """See BatchResult.lost_updates."""


@final
@dataclass(frozen=True)
class EvalResult:
    """The facts of one evaluation. Snapshots store it as JSON under these field names."""

    step: int
    epoch: int
    loss: float
    means: dict[str, float]
    samples: int
    lr: float
    took: float
    """Seconds the evaluation took."""
    seconds: float

    def value(self, metric: str) -> float:
        return self.loss if metric == "loss" else self.means[metric]


@final
@dataclass(frozen=True)
class EvalProgress:
    """How far an evaluation is. It is there to be shown, and changes nothing that is recorded."""

    step: int
    epoch: int
    batches: int
    """How many mini-batches are done; 0 when the evaluation begins."""
    seconds: float


TrainFact = StepResult | EvalResult
"""What a run records."""
TrainEvent = TrainFact | EvalProgress


@final
@dataclass(frozen=True)
class Position:
    """How far training has come: all the loop needs to resume."""

    step: int = 0
    seconds: float = 0.0
    evaluation: EvalResult | None = None
    """The most recent evaluation."""
    window: LossWindow = LossWindow()
    """The losses that no row of metrics contains yet."""

    @property
    def evaluated(self) -> bool:
        return self.evaluation is not None and self.evaluation.step == self.step

    def after(self, fact: TrainFact) -> Position:
        if isinstance(fact, EvalResult):
            return Position(fact.step, fact.seconds, fact, self.window)
        window = LossWindow() if fact.measured else fact.window
        return Position(fact.step, fact.seconds, self.evaluation, window)


@final
class MetricTotals:
    """Loss and metric sums of many batches, weighted by what the loss is a mean of."""

    def __init__(self) -> None:
        self.samples = 0
        self.weight = 0.0
        self._loss = 0.0
        self._sums: dict[str, float] = {}

    def add(self, facts: BatchResult) -> None:
        self.samples += facts.samples
        self.weight += facts.weight
        self._loss += facts.loss * facts.weight
        for name, value in facts.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    @property
    def loss(self) -> float:
        return self._loss / self.weight

    @property
    def means(self) -> dict[str, float]:
        return metric_means(self._sums, self.weight)


def metric_means(sums: Mapping[str, float], weight: float) -> dict[str, float]:
    """The mean of each metric, and the perplexity, which is no mean itself but follows from one."""
    means = {name: value / weight if weight else 0.0 for name, value in sums.items()}
    if (bits := means.get("bits_per_token")) is not None:
        means["perplexity"] = 2.0 ** min(bits, _MAX_EXPONENT)
    return means


def step_key(seed: int, step: int) -> int:
    """The key of a step. It depends on seed and step alone, so a resumed run draws the same random numbers."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, step), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def train(
    engine: Engine,
    spec: TrainSpec,
    train_batches: TrainBatches,
    eval_batches: EvalBatches,
    start: Position = Position(),  # noqa: B008 - immutable
) -> Generator[TrainEvent, None, None]:
    """Train from `start` to the last step; yield a fact after every step and every evaluation, and its progress."""
    began = time.perf_counter() - start.seconds
    step, window = start.step, start.window
    # A snapshot taken on a stop request between a step and its evaluation lacks that evaluation.
    if spec.evaluates_after(step) and not start.evaluated:
        yield from _evaluation(engine, spec, step, eval_batches, began)
    while step < spec.steps:
        epoch, first = divmod(step, spec.steps_per_epoch)
        for batch in train_batches(epoch, first):
            lr, measured = spec.lr_at(step), spec.measures(step + 1)
            try:
                facts = engine.train_step(batch, step_key(spec.seed, step), lr, measure=measured)
            except NumericError as error:
                error.add_note(f"step {step + 1}, epoch {epoch + 1}")
                raise
            step, window = step + 1, window.after(facts.loss)
            yield StepResult(
                step=step,
                epoch=epoch,
                loss=facts.loss,
                window=window,
                measured=measured,
                means=metric_means(facts.sums, facts.weight),
                lr=lr,
                samples=facts.samples,
                grad_norm=facts.grad_norm,
                skipped=facts.skipped,
                seconds=time.perf_counter() - began,
                transfers=facts.transfers,
                utilization=facts.utilization,
                timeline=facts.timeline,
                lost_updates=facts.lost_updates,
            )
            if measured:
                window = LossWindow()
            if step == spec.steps:
                break
            if spec.evaluates_after(step) and not spec.ends_epoch(step):
                yield from _evaluation(engine, spec, step, eval_batches, began)
        if spec.evaluates_after(step):
            yield from _evaluation(engine, spec, step, eval_batches, began)


def _evaluation(
    engine: Engine, spec: TrainSpec, step: int, eval_batches: EvalBatches, began: float
) -> Iterator[TrainEvent]:
    epoch = (step - 1) // spec.steps_per_epoch
    started, batches = time.perf_counter(), 0
    yield EvalProgress(step, epoch, batches, started - began)
    totals = MetricTotals()
    for batch in eval_batches(epoch):
        totals.add(engine.eval_step(batch))
        batches += 1
        yield EvalProgress(step, epoch, batches, time.perf_counter() - began)
    _check_scored(totals)
    took = time.perf_counter() - started
    if not math.isfinite(
        totals.loss
    ):  # raised before the snapshot: the last update may have broken the weights
        raise NumericError(
            f"the evaluation loss is {totals.loss} after step {step}, epoch {epoch + 1}; "
            "try a smaller optimizer.lr or clip_grad_norm=1"
        )
    seconds = time.perf_counter() - began
    yield EvalResult(
        step, epoch, totals.loss, totals.means, totals.samples, spec.lr_at(step - 1), took, seconds
    )


def evaluate(engine: Engine, batches: Iterable[Batch]) -> tuple[MetricTotals, float]:
    """Loss and metrics over all batches, and the seconds that took."""
    began = time.perf_counter()
    totals = MetricTotals()
    activity.now(lambda: f"evaluating, {totals.samples} samples done")
    for batch in batches:
        totals.add(engine.eval_step(batch))
    _check_scored(totals)
    return totals, time.perf_counter() - began


def _check_scored(totals: MetricTotals) -> None:
    if totals.samples == 0:
        raise DataError("there are no samples to evaluate on")
    if totals.weight == 0:
        raise DataError(
            "no sample to evaluate on has a label that the loss scores; hold out more or other data"
        )
