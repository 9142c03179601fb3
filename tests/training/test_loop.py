from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe_cli.engines.protocol import Batch, BatchResult
from gpipe_cli.errors import DataError, NumericError
from gpipe_cli.training.loop import (
    EvalProgress,
    EvalResult,
    LossWindow,
    MetricTotals,
    Position,
    StepResult,
    TrainEvent,
    TrainFact,
    TrainSpec,
    evaluate,
    metric_means,
    step_key,
    train,
)
from gpipe_cli.training.lr_schedules import Cosine


@final
@dataclass
class Fake:
    """An engine that computes nothing and remembers everything."""

    losses: dict[int, float] = field(default_factory=dict)
    """Of a batch, by its size."""
    trained: list[tuple[int, int, float]] = field(default_factory=list)
    """Samples, key and rate of every step."""
    module: nn.Module = field(default_factory=nn.Identity)

    def train_step(self, batch: Batch, key: int, lr: float, *, measure: bool = True) -> BatchResult:
        samples = len(batch[1])
        self.trained.append((samples, key, lr))
        loss = self.losses.get(samples, 1.0)
        if not math.isfinite(loss):
            raise NumericError("the loss is nan")
        return BatchResult(loss, samples, {"top1": samples / 2} if measure else {}, samples)

    def eval_step(self, batch: Batch) -> BatchResult:
        samples = len(batch[1])
        return BatchResult(self.losses.get(samples, 1.0), samples, {"top1": float(samples)}, samples)

    def close(self) -> None:
        pass


def batches(*sizes: int) -> Iterable[Batch]:
    return [(torch.zeros(size, 1), torch.zeros(size)) for size in sizes]


def plan(steps: int, per_epoch: int, seed: int = 0) -> TrainSpec:
    return TrainSpec(steps=steps, steps_per_epoch=per_epoch, lr=0.5, lr_schedule=Cosine(), seed=seed)


def events(engine: Fake, steps: int, seed: int = 0) -> Iterator[TrainEvent]:
    return train(
        engine,
        plan(steps, 2, seed),
        lambda epoch, first: list(batches(4, 2))[first:],
        lambda epoch: batches(3, 1),
    )


def run(engine: Fake, steps: int, seed: int = 0) -> Iterator[TrainFact]:
    return (event for event in events(engine, steps, seed) if not isinstance(event, EvalProgress))


@pytest.mark.parametrize(("every", "expected"), [(None, []), (2, [2, 4, 6, 7]), (9, [7])])
def test_evaluations_come_after_so_many_steps_and_the_last_one_or_not_at_all(
    every: int | None, expected: list[int]
) -> None:
    """A run of four steps trained for 11 s and evaluated for 183 s, and nothing could switch that off."""
    spec = replace(plan(7, per_epoch=3), eval_every=every, eval_epochs=False, measure_every=99)
    sizes = (4, 2, 2)
    facts = [
        fact
        for fact in train(
            Fake(), spec, lambda epoch, first: list(batches(*sizes))[first:], lambda epoch: batches(3)
        )
        if not isinstance(fact, EvalProgress)
    ]
    assert [fact.step for fact in facts if isinstance(fact, EvalResult)] == expected
    assert len(expected) <= spec.evaluations <= len(expected) + (every is not None)
    steps = [fact for fact in facts if isinstance(fact, StepResult)]
    assert [fact.step for fact in steps] == [*range(1, 8)] and steps[-1].measured
    position = Position()
    for fact in facts[:-1]:
        position = position.after(fact)
        assert not spec.is_done(position, None)
    assert spec.is_done(position.after(facts[-1]), None)


def test_evaluations_between_epochs_come_in_addition() -> None:
    spec = replace(plan(8, per_epoch=3), eval_every=2)
    sizes = (4, 2, 2)
    facts = list(
        train(Fake(), spec, lambda epoch, first: list(batches(*sizes))[first:], lambda epoch: batches(3))
    )
    evaluations = [(fact.step, fact.epoch) for fact in facts if isinstance(fact, EvalResult)]
    assert evaluations == [(2, 0), (3, 0), (4, 1), (6, 1), (8, 2)] and spec.evaluations >= len(evaluations)
    resumed = list(
        train(
            Fake(),
            spec,
            lambda epoch, first: list(batches(*sizes))[first:],
            lambda epoch: batches(3),
            Position(4, 1.0),
        )
    )
    assert [fact.step for fact in resumed if isinstance(fact, EvalResult)] == [4, 6, 8]


def test_every_epoch_ends_in_an_evaluation() -> None:
    facts = list(run(Fake(), steps=4))
    assert [(type(fact), fact.step, fact.epoch) for fact in facts] == [
        (StepResult, 1, 0),
        (StepResult, 2, 0),
        (EvalResult, 2, 0),
        (StepResult, 3, 1),
        (StepResult, 4, 1),
        (EvalResult, 4, 1),
    ]
    assert [fact.seconds for fact in facts] == sorted(fact.seconds for fact in facts)


def test_an_evaluation_tells_its_progress_before_its_first_and_after_each_batch() -> None:
    shown = [event for event in events(Fake(), steps=4) if isinstance(event, EvalProgress)]
    assert [(event.step, event.epoch, event.batches) for event in shown] == [
        (2, 0, 0),
        (2, 0, 1),
        (2, 0, 2),
        (4, 1, 0),
        (4, 1, 1),
        (4, 1, 2),
    ]


def test_a_run_may_end_in_the_middle_of_an_epoch() -> None:
    engine = Fake()
    facts = list(run(engine, steps=3))
    assert [(type(fact), fact.step) for fact in facts[-2:]] == [(StepResult, 3), (EvalResult, 3)]
    assert [samples for samples, _, _ in engine.trained] == [4, 2, 4]


def test_a_step_is_taken_only_when_it_is_asked_for() -> None:
    engine = Fake()
    facts = run(engine, steps=4)
    assert not engine.trained
    next(facts)
    assert len(engine.trained) == 1


def test_the_key_of_a_step_depends_on_seed_and_step_alone() -> None:
    short, long, other = Fake(), Fake(), Fake()
    list(run(short, steps=2, seed=7))
    list(run(long, steps=4, seed=7))
    list(run(other, steps=2, seed=8))
    keys = [key for _, key, _ in long.trained]
    assert [key for _, key, _ in short.trained] == keys[:2] == [step_key(7, 0), step_key(7, 1)]
    assert len({*keys, *(key for _, key, _ in other.trained)}) == 6


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_a_key_fits_a_generator_of_torch(seed: int, step: int) -> None:
    torch.Generator().manual_seed(step_key(seed, step))
    assert 0 <= step_key(seed, step) < 2**63


def test_the_rate_is_that_of_the_schedule_at_every_step() -> None:
    engine = Fake()
    facts = [fact for fact in run(engine, steps=4) if isinstance(fact, StepResult)]
    expected = [0.5 * Cosine().factor(step, 4) for step in range(4)]
    assert [lr for _, _, lr in engine.trained] == expected == [fact.lr for fact in facts]


def test_an_evaluation_weighs_batches_by_their_samples() -> None:
    result, seconds = evaluate(Fake(losses={3: 1.0, 1: 5.0}), batches(3, 1))
    assert (result.loss, result.samples, result.means) == (2.0, 4, {"top1": 1.0})
    assert seconds > 0


def test_counts_of_a_step_become_means_over_its_samples() -> None:
    fact = next(run(Fake(), steps=1))
    assert fact.means == {"top1": 0.5} and fact.samples == 4


def test_a_numeric_error_says_at_which_step() -> None:
    with pytest.raises(NumericError, match="the loss is nan") as caught:
        list(run(Fake(losses={2: math.nan}), steps=4))
    assert caught.value.__notes__ == ["step 2, epoch 1"]


def test_weights_that_evaluate_to_nothing_finite_are_no_result() -> None:
    """The very last update may spoil the weights: only the evaluation can see it."""
    with pytest.raises(
        NumericError, match=r"the evaluation loss is nan after step 2, epoch 1; try a smaller"
    ):
        list(run(Fake(losses={3: math.nan}), steps=2))


def test_nothing_to_evaluate_on_is_an_error() -> None:
    with pytest.raises(DataError, match="there are no samples to evaluate on"):
        evaluate(Fake(), [])


@pytest.mark.parametrize(("steps", "per_epoch", "epochs"), [(1, 5, 1), (5, 5, 1), (6, 5, 2), (10, 5, 2)])
def test_a_begun_epoch_counts_as_one(steps: int, per_epoch: int, epochs: int) -> None:
    assert plan(steps, per_epoch).epochs == epochs


def test_batches_weigh_by_what_their_loss_is_a_mean_of() -> None:
    totals = MetricTotals()
    totals.add(BatchResult(loss=1.0, samples=2, sums={"top1": 3.0}, weight=3.0))
    totals.add(BatchResult(loss=5.0, samples=2, sums={"top1": 0.0, "top5": 1.0}, weight=1.0))
    totals.add(BatchResult(loss=0.0, samples=2, sums={"top1": 0.0}, weight=0.0))
    assert (totals.samples, totals.loss) == (6, 2.0)
    assert totals.means == {"top1": 0.75, "top5": 0.25}


def test_the_perplexity_is_that_of_all_tokens_and_not_the_mean_over_batches() -> None:
    totals = MetricTotals()
    totals.add(BatchResult(loss=0.0, samples=1, sums={"bits_per_token": 1.0}, weight=1.0))
    totals.add(BatchResult(loss=0.0, samples=1, sums={"bits_per_token": 15.0}, weight=3.0))
    assert totals.means == {"bits_per_token": 4.0, "perplexity": 16.0}
    assert metric_means({"bits_per_token": 9e9}, 1.0)["perplexity"] == 2.0**1023


def test_held_out_samples_without_a_scored_label_cannot_be_evaluated() -> None:
    unscored = Fake()
    unscored.eval_step = lambda batch: BatchResult(0.0, len(batch[1]), {}, 0.0)  # type: ignore[method-assign]
    with pytest.raises(DataError, match="no sample to evaluate on has a label that the loss scores"):
        evaluate(unscored, batches(4))


def test_the_first_step_every_nth_and_those_before_evaluations_are_measured() -> None:
    spec = replace(plan(steps=7, per_epoch=5), measure_every=3)
    facts = list(train(Fake(), spec, lambda epoch, first: batches(4, 4, 4, 4, 4), lambda epoch: batches(4)))
    steps = [fact for fact in facts if isinstance(fact, StepResult)]
    assert [fact.step for fact in steps if fact.measured] == [1, 3, 5, 6, 7]
    assert all(fact.means == ({"top1": 0.5} if fact.measured else {}) for fact in steps)


def test_windows_contain_every_loss_once_however_often_a_run_stops() -> None:
    losses = {1: 0.5, 2: 4.0, 3: -1.0, 4: 2.0, 5: 0.0, 6: 1.0, 7: 8.0}
    spec = replace(plan(steps=7, per_epoch=7), measure_every=4)

    def facts_from(start: Position) -> Iterator[TrainFact]:
        sizes = list(losses)
        all_events = train(
            Fake(losses), spec, lambda epoch, first: batches(*sizes[first:]), lambda epoch: batches(5), start
        )
        return (event for event in all_events if not isinstance(event, EvalProgress))

    whole = list(facts_from(Position()))
    windows = [fact.window for fact in whole if isinstance(fact, StepResult) and fact.measured]
    assert windows == [
        LossWindow(1, 0.5, 0.5, 0.5),
        LossWindow(3, 5.0, -1.0, 4.0),
        LossWindow(3, 9.0, 0.0, 8.0),
    ]
    assert windows[2].mean == 3.0
    position = Position()
    for done, fact in enumerate(whole, 1):
        position = position.after(fact)
        rest = [other.window for other in facts_from(position) if isinstance(other, StepResult)]
        assert rest == [other.window for other in whole[done:] if isinstance(other, StepResult)]
