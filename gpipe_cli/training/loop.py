"""The training loop: epochs of steps with an evaluation after each, as a generator of facts.

It decides order and keys; it knows nothing of files, terminals or of how a step is run. Whoever drives it
writes the facts down.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from gpipe_cli.engines.protocol import Batch, Engine
from gpipe_cli.engines.utilisation import Utilisation
from gpipe_cli.errors import DataError, NumericError
from gpipe_cli.offload.transfers import Transfers
from gpipe_cli.training.lr_schedules import LrSchedule
from gpipe_cli.training.metrics import Tally

TrainBatches = Callable[[int, int], Iterable[Batch]]
"""The mini-batches of an epoch from one of them on."""
EvalBatches = Callable[[int], Iterable[Batch]]
"""The held-out mini-batches."""


@dataclass(frozen=True)
class Plan:
    """How far to train, and at which rate."""

    steps: int
    steps_per_epoch: int
    lr: float
    lr_schedule: LrSchedule
    seed: int

    @property
    def epochs(self) -> int:
        return -(-self.steps // self.steps_per_epoch)

    def rate(self, step: int) -> float:
        return self.lr * self.lr_schedule.factor(step, self.steps)

    def evaluates_after(self, step: int) -> bool:
        """Whether that many steps end an epoch or the run."""
        return step > 0 and (step % self.steps_per_epoch == 0 or step == self.steps)


@dataclass(frozen=True)
class Trained:
    """One step."""

    step: int
    epoch: int
    loss: float
    means: dict[str, float]
    lr: float
    samples: int
    grad_norm: float | None
    skipped: bool
    seconds: float
    """Since the loop began."""
    transfers: Transfers | None = None
    """Of the model, where it does not stay on its devices."""
    utilisation: Utilisation | None = None


@dataclass(frozen=True)
class Evaluated:
    """All held-out samples, once."""

    step: int
    epoch: int
    loss: float
    means: dict[str, float]
    samples: int
    lr: float
    took: float
    """Seconds the evaluation took."""
    seconds: float


Fact = Trained | Evaluated


@dataclass(frozen=True)
class Position:
    """How far training has come: all that the loop itself must know to go on."""

    step: int = 0
    seconds: float = 0.0
    evaluation: Evaluated | None = None
    """The last one."""

    @property
    def evaluated(self) -> bool:
        return self.evaluation is not None and self.evaluation.step == self.step

    def after(self, fact: Fact) -> Position:
        evaluation = fact if isinstance(fact, Evaluated) else self.evaluation
        return Position(fact.step, fact.seconds, evaluation)


def step_key(seed: int, step: int) -> int:
    """The key of a step: a function of seed and step alone, so a resumed run draws what the first would have."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, step), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def train(
    engine: Engine,
    plan: Plan,
    train_batches: TrainBatches,
    eval_batches: EvalBatches,
    start: Position = Position(),  # noqa: B008 - immutable
) -> Generator[Fact, None, None]:
    """Run the plan from where it stands; a fact after every step and after every evaluation."""
    began = time.perf_counter() - start.seconds
    step = start.step
    if plan.evaluates_after(step) and not start.evaluated:
        yield _evaluation(engine, plan, step, eval_batches, began)
    while step < plan.steps:
        epoch, first = divmod(step, plan.steps_per_epoch)
        for batch in train_batches(epoch, first):
            lr = plan.rate(step)
            try:
                facts = engine.train_step(batch, step_key(plan.seed, step), lr)
            except NumericError as error:
                error.add_note(f"step {step + 1}, epoch {epoch + 1}")
                raise
            step += 1
            means = {name: value / facts.samples for name, value in facts.sums.items()}
            seconds = time.perf_counter() - began
            yield Trained(
                step,
                epoch,
                facts.loss,
                means,
                lr,
                facts.samples,
                facts.grad_norm,
                facts.skipped,
                seconds,
                facts.transfers,
                facts.utilisation,
            )
            if step == plan.steps:
                break
        yield _evaluation(engine, plan, step, eval_batches, began)


def _evaluation(engine: Engine, plan: Plan, step: int, batches: EvalBatches, began: float) -> Evaluated:
    epoch = (step - 1) // plan.steps_per_epoch
    found, took = evaluate(engine, batches(epoch))
    if not math.isfinite(found.loss):  # the last update may have done it: such weights are not saved
        raise NumericError(
            f"the evaluation's loss is {found.loss}; try a smaller optimizer.lr or clip_grad_norm=1 "
            f"(after step {step}, epoch {epoch + 1})"
        )
    seconds = time.perf_counter() - began
    return Evaluated(step, epoch, found.loss, found.means, found.samples, plan.rate(step - 1), took, seconds)


def evaluate(engine: Engine, batches: Iterable[Batch]) -> tuple[Tally, float]:
    """Loss and counts over all batches, and the seconds it took."""
    began = time.perf_counter()
    tally = Tally()
    for batch in batches:
        facts = engine.eval_step(batch)
        tally.add(facts.loss, facts.samples, facts.sums)
    if tally.samples == 0:
        raise DataError("there are no samples to evaluate on")
    return tally, time.perf_counter() - began
