from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.prediction import Prediction, advice, predict
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
    assert prediction.overrides.endswith("schedule=1f1b checkpoint=[always,never]")
    assert prediction.record()["checkpoint"] == ["always", "never"]


def test_the_plain_run_is_recommended_where_it_is_quickest() -> None:
    costs = LayerCosts([1.0] * 4, [2.0] * 4)
    plain = _predicted(PlanShape(1, 1, 1, "1f1b", "never"), (4,), costs)
    pipe = _predicted(PlanShape(2, 2, 4, "1f1b", "never"), (2, 2), costs)
    assert "without a pipeline" in advice([plain, pipe]) and "times as long" in advice([plain, pipe])
    assert advice([replace(pipe, step_ms=6.0), plain]).startswith("2.00 times as fast as without a pipeline")
    # On a busy machine `gpipe plan` claimed 3.90 times on two cores, and 2.63 times on one.
    impossible = advice([replace(pipe, step_ms=3.0), plain])
    assert impossible.startswith(
        "the times disagree: on 2 device(s) no pipeline is 4.00 times as fast as without one"
    )
    assert plain.overrides == "engine=single chunks=1"


def test_an_error_is_a_share_of_what_was_measured() -> None:
    costs = LayerCosts([1.0], [2.0])
    prediction = _predicted(PlanShape(1, 1, 1, "1f1b", "never"), (1,), costs)
    assert prediction.error is None and "measured_ms" not in prediction.record()
    measured = replace(prediction, measured_ms=4.0)
    assert measured.error == pytest.approx(-0.25) and measured.record()["measured_ms"] == 4.0
