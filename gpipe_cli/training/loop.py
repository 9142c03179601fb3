"""The training loop: epochs of steps with an evaluation after each, as a generator of facts.

It decides order and keys; it knows nothing of files, terminals or of how a step is run. Whoever drives it
writes the facts down.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gpipe_cli.engines.protocol import Batch, Engine
from gpipe_cli.errors import DataError, NumericError
from gpipe_cli.training.lr_schedules import LrSchedule
from gpipe_cli.training.metrics import Tally

Batches = Callable[[int], Iterable[Batch]]
"""The mini-batches of an epoch."""


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


def step_key(seed: int, step: int) -> int:
    """The key of a step: a function of seed and step alone, so a resumed run draws what the first would have."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, step), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def train(engine: Engine, plan: Plan, train_batches: Batches, eval_batches: Batches) -> Iterator[Fact]:
    """Run the plan; a fact after every step and after every evaluation."""
    began = time.perf_counter()
    step = 0
    for epoch in range(plan.epochs):
        lr = plan.lr
        for batch in train_batches(epoch):
            lr = plan.lr * plan.lr_schedule.factor(step, plan.steps)
            try:
                facts = engine.train_step(batch, step_key(plan.seed, step), lr)
            except NumericError as error:
                error.add_note(f"step {step + 1}, epoch {epoch + 1}")
                raise
            step += 1
            means = {name: value / facts.samples for name, value in facts.sums.items()}
            seconds = time.perf_counter() - began
            yield Trained(
                step, epoch, facts.loss, means, lr, facts.samples, facts.grad_norm, facts.skipped, seconds
            )
            if step == plan.steps:
                break
        found, took = evaluate(engine, eval_batches(epoch))
        if not math.isfinite(found.loss):  # the last update may have done it: such weights are not saved
            raise NumericError(
                f"the evaluation's loss is {found.loss}; try a smaller optimizer.lr or clip_grad_norm=1 "
                f"(after step {step}, epoch {epoch + 1})"
            )
        seconds = time.perf_counter() - began
        yield Evaluated(step, epoch, found.loss, found.means, found.samples, lr, took, seconds)


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
