from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli import GPipe
from gpipe_cli.profiling import timeline
from gpipe_cli.profiling.records import preserved
from gpipe_cli.profiling.timeline import (
    ActionRecorder,
    BalanceGain,
    PartitionTime,
    StepTimeline,
    compare_with_ideal,
    diagnose,
    median_step,
    recording,
    run_steps,
)
from gpipe_cli.schedule.action import Action, Kind
from gpipe_cli.schedule.simulate import Span
from gpipe_cli.schedule.spec import PipelineSpec


def make_pipe(checkpoint: str = "except_last", schedule: str = "gpipe") -> GPipe:
    module = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8), nn.ReLU(inplace=True)
    )
    return GPipe(module, [3, 2], devices=["cpu", "cpu"], chunks=3, checkpoint=checkpoint, schedule=schedule)


def record(pipe: GPipe, steps: int = 1) -> list[StepTimeline]:
    data = torch.linspace(0, 1, 48).reshape(6, 8)
    with preserved(pipe):
        return run_steps(pipe, partial(pipe.step, data, data, nn.functional.mse_loss, key=0), least=steps)


def test_every_action_is_recorded_by_its_worker_and_none_overlap() -> None:
    with make_pipe() as pipe:
        first, second = record(pipe, steps=2)
    for partition, handed_over in ((0, ["copy 0", "copy 1", "copy 2"]), (1, ["copy 0", "copy 1", "copy 2"])):
        own = [span for span in second.spans if span.action.partition == partition]
        computed = [span.label for span in own if span.phase != "copy"]
        assert computed == ["F0", "F1", "F2", "R0", "B0", "R1", "B1", "B2"]
        assert [span.label for span in own if span.phase == "copy"] == handed_over
        assert len({span.worker for span in own}) == 1
        assert all(before.end <= after.begin for before, after in pairwise(own))
    assert {span.worker for span in first.spans} == {span.worker for span in second.spans}
    assert threading.get_native_id() not in {span.worker for span in second.spans}
    assert 0 <= second.bubble < 1


def test_a_split_backward_has_two_labels() -> None:
    with make_pipe("never", "zero_bubble") as pipe:
        (step,) = record(pipe)
    labels = {span.label[0] for span in step.spans}
    assert {"F", "I", "W"} <= labels and "R" not in labels


def test_recording_leaves_the_model_as_it_was() -> None:
    with make_pipe() as pipe:
        pipe.eval()
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        generator = torch.get_rng_state()
        record(pipe)
        assert all(torch.equal(before[name], tensor) for name, tensor in pipe.state_dict().items())
        assert not any(module.training for module in pipe.modules())
        assert all(parameter.grad is None for parameter in pipe.parameters())
        assert torch.equal(generator, torch.get_rng_state())
        assert pipe.recorder is None


def test_recording_ends_with_its_block_even_if_a_layer_fails() -> None:
    with make_pipe() as pipe:
        with pytest.raises(RuntimeError), recording(pipe):
            pipe(torch.randn(6, 7))
        assert pipe.recorder is None


def span(kind: Kind, partition: int, begin: float, end: float, phase: str = "forward") -> Span:
    return Span(Action(kind, partition, 0), partition, begin, end, phase)


STEP = StepTimeline(
    (
        span(Kind.FORWARD, 0, 1, 2),
        span(Kind.FORWARD, 1, 2, 4),
        span(Kind.BACKWARD, 1, 4, 8, "backward"),
        span(Kind.BACKWARD, 0, 7, 8, "recompute"),
        span(Kind.BACKWARD, 0, 8, 11, "backward"),
    )
)


def test_busy_bubble_and_waiting_are_shares_of_the_step() -> None:
    assert (STEP.begin, STEP.seconds) == (1, 10)
    assert STEP.bubble == pytest.approx(1 - 11 / 20)
    first, second = STEP.partition(0), STEP.partition(1)
    assert (first.busy, first.recompute, first.bubble, first.waiting) == pytest.approx((0.5, 0.1, 0.5, 5))
    assert (second.busy, second.recompute, second.bubble, second.waiting) == pytest.approx((0.6, 0, 0.4, 0))


def test_a_copy_that_runs_beside_the_computation_is_no_more_work() -> None:
    first = [span(Kind.FORWARD, 0, 0, 4), span(Kind.FORWARD, 0, 4, 8), span(Kind.BACKWARD, 0, 12, 16)]
    copies = [span(Kind.FORWARD, 0, 4, 7, "copy"), span(Kind.FORWARD, 0, 8, 10, "copy")]
    step = StepTimeline((*first, *copies))
    assert step.bubble == pytest.approx(2 / 16)
    assert (step.partition(0).busy, step.partition(0).waiting) == pytest.approx((14 / 16, 2))


def test_the_median_step_is_the_one_in_the_middle() -> None:
    steps = [StepTimeline((span(Kind.FORWARD, 0, 0, length),)) for length in (5, 1, 3)]
    assert median_step(steps).seconds == 3


@pytest.mark.accelerator
def test_work_on_an_accelerator_is_timed_by_its_events(accelerators: list[torch.device]) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    sample = torch.randn(128, 64, device=accelerators[0])
    with GPipe(module, [1, 1], devices=[accelerators[0]] * 2, chunks=2) as pipe:
        (step,) = run_steps(pipe, partial(pipe.step, sample, sample, nn.functional.mse_loss), least=1)
    assert all(span.end > span.begin for span in step.spans if span.phase == "forward")
    for partition in (0, 1):
        own = [span for span in step.spans if span.action.partition == partition]
        assert all(before.end <= after.begin + 1e-6 for before, after in pairwise(own))


@pytest.mark.accelerator
def test_copies_between_devices_read_as_zero(accelerators: list[torch.device]) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    data = [torch.randn(256, 64, device=device) for device in accelerators[:2]]
    with GPipe(module, [1, 1], devices=accelerators[:2], chunks=2) as pipe:
        (step,) = run_steps(pipe, partial(pipe.step, *data, nn.functional.mse_loss), least=1)
    copies = [span for span in step.spans if span.phase == "copy"]
    assert [span.label for span in copies].count("copy 0") == 2
    assert all(span.end > span.begin for span in copies)


@pytest.mark.accelerator
def test_a_copy_is_timed_where_it_runs(simulated: Any) -> None:
    """In the asynchronous mode a kernel takes a while, and the worker computes the next micro-batch meanwhile."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    data = [torch.randn(256, 64, device=device) for device in simulated.devices[:2]]
    with simulated.asynchronous(), GPipe(module, [1, 1], devices=simulated.devices[:2], chunks=4) as pipe:
        (step,) = run_steps(pipe, partial(pipe.step, *data, nn.functional.mse_loss), least=1)
        assert simulated.races() == []
    own = [span for span in step.spans if span.action.partition == 0]
    forwards = [span for span in own if span.phase == "forward"]
    copies = [span for span in own if span.phase == "copy"]
    # A copy begins when its forward ends, and not when the worker asked for it, which is earlier.
    assert all(copy.begin >= forward.end for forward, copy in zip(forwards, copies, strict=True))
    assert 0 <= step.bubble <= 1


def times(*busy: float, recompute: float = 0.0) -> list[PartitionTime]:
    return [PartitionTime(share, recompute, 1 - share, 0.0) for share in busy]


@pytest.mark.parametrize(
    ("partitions", "spec", "bubble", "ideal", "advice"),
    [
        (times(0.9, 0.9), PipelineSpec("gpipe", 2, 8), 0.1, 0.1, ["nothing stands out"]),
        (times(0.8, 0.8), PipelineSpec("gpipe", 2, 4), 0.2, 0.2, ["chunks=8", "schedule=zero_bubble"]),
        (times(0.8, 0.8), PipelineSpec("zero_bubble", 2, 64), 0.2, 0.2, ["nothing stands out"]),
        (times(0.6, 0.6), PipelineSpec("gpipe", 2, 8, cores=2), 0.4, 0.1, ["fewer chunks"]),
        (times(0.6, 0.6, 0.6), PipelineSpec("gpipe", 3, 8, cores=2), 0.4, 0.1, ["partitions=2"]),
        (times(0.9, 0.9, recompute=0.2), PipelineSpec("gpipe", 2, 8), 0.1, 0.1, ["checkpoint=never"]),
    ],
)
def test_what_to_try_follows_from_what_was_measured(
    partitions: list[PartitionTime], spec: PipelineSpec, bubble: float, ideal: float, advice: list[str]
) -> None:
    diagnosis = diagnose(partitions, spec, bubble=bubble, ideal_bubble=ideal, rows=64)
    assert len(diagnosis.advice) == len(advice)
    assert all(given.startswith(start) for given, start in zip(diagnosis.advice, advice, strict=True))


def test_a_better_balance_is_the_first_thing_to_try() -> None:
    gain = BalanceGain([5, 5], 461.0, [4, 6], 371.0)
    diagnosis = diagnose(
        times(0.6, 0.9), PipelineSpec("gpipe", 2, 4), bubble=0.25, ideal_bubble=0.2, rows=64, gain=gain
    )
    assert diagnosis.advice == [
        "balance=time: [4, 6] instead of [5, 5] makes a step of 461 ms one of 371 ms, by the times of the layers"
    ]
    small = replace(gain, best_step_ms=450.0)
    diagnosis = diagnose(
        times(0.8, 0.9), PipelineSpec("gpipe", 2, 4), bubble=0.2, ideal_bubble=0.2, rows=64, gain=small
    )
    assert diagnosis.advice[0].startswith("chunks=8")


def test_a_step_that_differs_from_its_ideal_is_explained() -> None:
    def step(seconds: float) -> StepTimeline:
        return StepTimeline((Span(Action(Kind.FORWARD, 0, 0), 0, 0.0, seconds, "forward"),))

    assert compare_with_ideal(step(1.1), step(1.0), cores=2) == ""
    assert "shorter than the ideal" in compare_with_ideal(step(0.8), step(1.0), cores=2)
    assert "in the pipeline they took 0.80 times as long" in compare_with_ideal(step(0.8), step(1.0), 2)
    assert "layers took 1.50 times as long as alone" in compare_with_ideal(step(1.5), step(1.0), None)
    assert "workers share 2 cores" in compare_with_ideal(step(1.5), step(1.0), 2)


def test_the_bottleneck_is_the_partition_that_is_busy_longest() -> None:
    diagnosis = diagnose(
        times(0.5, 0.8, 0.7), PipelineSpec("gpipe", 3, 8), bubble=0.1, ideal_bubble=0.1, rows=64
    )
    assert diagnosis.bottleneck == 1


DAY = 86_400.0
GPU = torch.device("cuda:0")


class Event:
    """An event of a device, which has the clock of the host; as torch, it answers in milliseconds of float32."""

    device = GPU

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return float(torch.tensor(1000 * (end.at - self.at), dtype=torch.float32))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    now = SimpleNamespace(seconds=0.0, synchronized=count())
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: now.seconds)
    monkeypatch.setattr(timeline, "record_timing_event", lambda stream: Event())
    monkeypatch.setattr(timeline, "current_stream", lambda device: None)
    monkeypatch.setattr(timeline, "synchronize", lambda devices: next(now.synchronized))
    return now


def test_after_a_day_times_were_8_ms_apart(clock: Any) -> None:
    recorder = ActionRecorder([GPU])
    for begin in (0.25, DAY + 0.25):
        clock.seconds = begin - 0.125
        recorder.clear()
        clock.seconds = begin
        started = recorder.now(GPU)
        clock.seconds = begin + 0.001
        recorder(Action(Kind.FORWARD, 0, 0), "forward", started, recorder.now(GPU))
        (span,) = recorder.spans()
        assert span.begin == pytest.approx(begin, abs=1e-6)
        assert span.end - span.begin == pytest.approx(0.001, abs=1e-6)


def test_reading_the_spans_waits_for_the_devices(clock: Any) -> None:
    recorder = ActionRecorder([GPU])
    before = next(clock.synchronized)
    recorder.spans()
    assert next(clock.synchronized) == before + 2
