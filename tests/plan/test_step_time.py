from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_cli.plan import step_time
from gpipe_cli.plan.step_time import follows_clock, long_step
from gpipe_cli.schedule.action import MODES, Checkpoint
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec

numbers = st.integers(1, 50).map(float)
shapes = st.tuples(st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.integers(1, 6), st.integers(1, 3))


def _spec(schedule: str, devices: int, turns: int, chunks: int, checkpoint: Checkpoint) -> PipelineSpec:
    partitions = devices * (turns if schedule == "interleaved" else 1)
    return PipelineSpec(schedule, partitions, chunks, checkpoint, devices)


@settings(max_examples=100)
@given(shapes, st.integers(1, 14), st.data())
def test_all_devices_at_once_take_what_action_by_action_takes(
    shape: tuple[str, int, int], chunks: int, data: st.DataObject
) -> None:
    partitions = _spec(*shape, chunks, "never").partitions
    modes = st.lists(st.sampled_from(MODES), min_size=partitions, max_size=partitions).map(tuple)
    spec = _spec(*shape, chunks, data.draw(st.sampled_from(MODES) | modes))
    costs = [
        PartitionCost(data.draw(numbers), data.draw(numbers), data.draw(numbers), data.draw(numbers))
        for _ in range(spec.partitions)
    ]
    assert follows_clock(spec)
    assert long_step(spec, costs) == pytest.approx(spec.simulate(costs).step)


@pytest.mark.parametrize(("schedule", "turns"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_a_steady_state_goes_on_as_the_whole_simulation_does_at_256_devices(
    monkeypatch: pytest.MonkeyPatch, schedule: str, turns: int
) -> None:
    draw = random.Random(0)
    spec = _spec(schedule, 256, turns, 3072, "except_last")
    costs = [
        PartitionCost(draw.uniform(1, 2), draw.uniform(2, 4), draw.uniform(1, 2), draw.uniform(0, 0.1))
        for _ in range(spec.partitions)
    ]
    whole = long_step(spec, costs)
    monkeypatch.setattr(step_time, "MAX_TICKS", 0)
    assert long_step(spec, costs) == pytest.approx(whole, rel=2e-3)


def test_what_shares_cores_or_splits_backward_has_no_clock() -> None:
    assert not follows_clock(PipelineSpec("1f1b", 4, 8, cores=2))
    assert not follows_clock(PipelineSpec("zero_bubble", 4, 8))
