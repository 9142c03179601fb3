from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.prediction import Prediction, advice, by_recommendation, predict
from gpipe_cli.plan.search import BestBalance, PlanShape, RankedPlan
from gpipe_cli.plan.step_time import step_ms
from gpipe_cli.profiling.memory import PartitionMemory

MEMORY = [PartitionMemory(1, 2, 3, 4)] * 4


def _predicted(shape: PlanShape, balance: tuple[int, ...], costs: LayerCosts, **more: float) -> Prediction:
    step = step_ms(shape.spec(), costs, balance)
    answer = RankedPlan(shape, BestBalance(balance, shape.checkpoint, step, step))
    return predict(answer, costs, MEMORY[: len(balance)], cores=None, batch_size=32, **more)


@pytest.mark.parametrize(
    ("balance", "chunks", "transfer", "limit"),
    [
        ((1, 3), 64, 0.0, "slowest partition"),
        ((2, 2), 2, 0.0, "bubble"),
        ((2, 2), 2, 9.0, "transfers"),
        ((2, 2), 512, 0.0, "work"),
    ],
)
def test_what_would_shorten_the_step_most_limits_it(
    balance: tuple[int, ...], chunks: int, transfer: float, limit: str
) -> None:
    costs = LayerCosts([1.0] * 4, [2.0] * 4, transfer=[transfer] * 4)
    prediction = _predicted(PlanShape(2, 2, chunks, "1f1b", "never"), balance, costs)
    assert prediction.limit.name == limit
    assert (prediction.limit.share > 0.02) == (limit != "work")


def test_memory_limits_a_plan_that_would_be_quicker_without_a_limit() -> None:
    costs = LayerCosts([1.0] * 4, [2.0] * 4)
    prediction = _predicted(PlanShape(2, 2, 64, "1f1b", "always"), (2, 2), costs, without_limit_ms=100.0)
    assert prediction.limit.name == "memory"
    assert "larger device_memory" in advice([prediction])


def test_devices_that_hold_several_partitions_need_the_memory_of_all() -> None:
    costs = LayerCosts([1.0] * 4, [2.0] * 4)
    prediction = _predicted(PlanShape(4, 2, 8, "interleaved", "never"), (1, 1, 1, 1), costs)
    assert [device.total_bytes for device in prediction.memory] == [20, 20] and prediction.peak_bytes == 20
    assert prediction.overrides.endswith("schedule=interleaved checkpoint=never devices=2")


def test_modes_that_differ_are_given_as_a_list() -> None:
    costs = LayerCosts([1.0] * 4, [2.0] * 4)
    prediction = _predicted(PlanShape(2, 2, 4, "1f1b", ("always", "never")), (2, 2), costs)
    assert prediction.overrides.endswith("schedule=1f1b 'checkpoint=[always,never]'")
    assert prediction.record()["checkpoint"] == ["always", "never"]


def test_the_plain_run_is_recommended_where_it_is_quickest() -> None:
    costs = LayerCosts([1.0] * 4, [2.0] * 4)
    plain = _predicted(PlanShape(1, 1, 1, "1f1b", "never"), (4,), costs)
    pipe = _predicted(PlanShape(2, 2, 4, "1f1b", "never"), (2, 2), costs)
    assert "without a pipeline" in advice([plain, pipe]) and "times as long" in advice([plain, pipe])
    assert advice([replace(pipe, step_ms=6.0), plain]).startswith(
        "2.00 times as fast as without a pipeline; "
    )
    assert advice([plain]) == "train without a pipeline; there was none to compare it with"
    assert plain.overrides == "engine=single chunks=1"


def _plain_and_pipe(spread: float = 0.0) -> tuple[Prediction, Prediction]:
    """12 ms without a pipeline, and 8 ms on two devices."""
    costs = LayerCosts([1.0] * 4, [2.0] * 4, spread=spread)
    plain = _predicted(PlanShape(1, 1, 1, "1f1b", "never"), (4,), costs)
    pipe = _predicted(PlanShape(2, 2, 4, "1f1b", "never"), (2, 2), costs)
    return plain, replace(pipe, step_ms=8.0)


def test_a_gain_below_the_spread_of_the_measurements_is_none() -> None:
    """On a busy machine `gpipe plan` recommended a plan that was 1.06 times as fast, which was noise."""
    plain, pipe = _plain_and_pipe(spread=0.1)
    first, *_ = sure = by_recommendation([pipe, plain])
    assert first is pipe
    assert advice(sure).startswith(
        "1.50 times as fast as without a pipeline (predicted; measurements of the same differ by 10 %); "
    )
    close = by_recommendation([replace(pipe, step_ms=11.5), plain])
    assert close[0] is plain
    assert advice(close) == (
        "no measurable gain; train without a pipeline: the best pipeline differs from it by 4 %, and measurements of "
        "the same by 10 %"
    )
    # A memory limit may force a pipeline, whose advice names its uncertainty too.
    assert advice([pipe]).endswith("(predicted; measurements of the same differ by 10 %)")
    unknown = by_recommendation(list(reversed(_plain_and_pipe(spread=inf))))
    assert advice(unknown).startswith("train without a pipeline: the time did not suffice to measure")
    assert unknown[0].record()["spread"] is None


@pytest.mark.parametrize(("devices", "spread"), [(1, 0.1), (2, 0.1), (2, 0.0)])
def test_no_speed_up_above_the_number_of_devices_is_claimed(devices: int, spread: float) -> None:
    """On a busy machine `gpipe plan` claimed 27.71 times on two workers, and 2.63 times on one device."""
    plain, pipe = _plain_and_pipe(spread)
    quick = replace(pipe, shape=replace(pipe.shape, devices=devices), step_ms=0.4)
    said = advice(by_recommendation([quick, plain]))
    assert "times as fast" not in said and "30" not in said
    # Estimates of devices that differ may say so: the run without a pipeline has the first one only.
    expected = "the times disagree: they promise more than the devices can give; run it again"
    assert said.startswith(
        expected if spread else "faster than without a pipeline, which uses the first device"
    )


def test_after_a_verification_the_advice_follows_what_was_measured() -> None:
    plain, pipe = _plain_and_pipe(spread=0.05)
    other = replace(pipe, step_ms=9.0, shape=replace(pipe.shape, checkpoint="always"))
    run = [
        replace(pipe, measured_ms=20.0, spread=0.05),
        replace(plain, measured_ms=16.0, spread=0.05),
        replace(other, measured_ms=10.0, spread=0.05),
    ]
    assert [plan.measured_ms for plan in by_recommendation(run)] == [10.0, 16.0, 20.0]
    said = advice(by_recommendation(run))
    assert said.startswith("1.60 times as fast as without a pipeline (measured; ")
    assert said.endswith(
        "; the predictions were wrong by up to 60 %, so plans that were not run may be faster"
    )
    assert by_recommendation(run)[0].record()["samples_per_second"] == pytest.approx(3200)
    # Plans that there was no time to run come last, and a run that varies proves nothing.
    assert by_recommendation([pipe, *run[1:]])[-1] is pipe
    noisy = by_recommendation([*run[:2], replace(run[2], spread=0.7)])
    assert noisy[0].is_plain and advice(noisy).startswith("no measurable gain; train without a pipeline")


def test_an_error_is_a_share_of_what_was_measured() -> None:
    costs = LayerCosts([1.0], [2.0])
    prediction = _predicted(PlanShape(1, 1, 1, "1f1b", "never"), (1,), costs)
    assert prediction.error is None and "measured_ms" not in prediction.record()
    measured = replace(prediction, measured_ms=4.0)
    assert measured.error == pytest.approx(-0.25) and measured.record()["measured_ms"] == 4.0
