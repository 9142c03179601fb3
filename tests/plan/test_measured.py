from __future__ import annotations

import time
import weakref
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_cli.accelerator.devices import use_threads
from gpipe_cli.errors import ConfigError
from gpipe_cli.plan import measured
from gpipe_cli.plan.costs import TransferCost
from gpipe_cli.plan.measured import MeasuredSource, MicroBatchSize, measure_link, verify_plans
from gpipe_cli.plan.prediction import Limit, Prediction
from gpipe_cli.plan.search import PlanShape
from gpipe_cli.profiling.equal_layers import LayerSample
from gpipe_cli.profiling.model_stats import ModelStats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.orders import zero_bubble_v

CPU = torch.device("cpu")


def _bench(
    model: nn.Sequential,
    devices: int,
    *,
    apart: bool = False,
    sample: LayerSample | None = None,
) -> MeasuredSource:
    input, target = torch.randn(4, 8), torch.randn(4, 8)

    def sample_of(rows: int) -> Sample:
        return Sample(input[:rows], target[:rows], functional.mse_loss)

    class Stats:
        """The statistics of the model, of which measuring asks for the layers to run."""

        def layer_sample(self, room: float) -> LayerSample | None:
            return sample

        def boundary(self, place: int) -> SimpleNamespace:
            return SimpleNamespace(bytes=32)

    stats = cast(ModelStats, Stats())
    return MeasuredSource(
        model, [CPU] * devices, sample_of=sample_of, stats_of=lambda rows: stats, folder=None, apart=apart
    )


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "available_cores", lambda: 2)


def _sizes(*chunks: int) -> list[MicroBatchSize]:
    return [MicroBatchSize(4 // number, number) for number in chunks]


def test_every_size_for_which_there_is_time_has_its_costs() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    bench = _bench(model, 2)
    assert bench.prepare(_sizes(1, 4, 2), time.monotonic() + 60) == [4, 1, 2]
    alone, pipe = bench.costs(4, 1).partition(0, 3), bench.costs(1, 2).partition(0, 3)
    assert min(alone.forward, alone.backward, pipe.forward, pipe.backward, pipe.recompute) > 0


def test_without_time_the_plain_run_is_measured_alone() -> None:
    assert _bench(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 2).prepare(_sizes(1, 4, 2), 0.0) == [4]


def test_when_it_is_late_a_single_layer_runs_and_no_pipeline_does() -> None:
    """A plain run so slow that its eighteen passes took longer than plan.budget was measured to the end."""

    class Counted(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            ran.add(self)
            return super().forward(input)

    ran: set[nn.Module] = set()  # with copies that count FLOPs
    model = nn.Sequential(*(Counted(8, 8) for _ in range(4)))
    bench = _bench(model, 2)
    assert bench.prepare(_sizes(1, 4, 2), 0.0) == [4] and ran & {*model} == {model[0]}
    costs = bench.costs(4, 1).partition(0, 4)
    assert costs.forward == costs.recompute > 0
    assert "estimated from FLOPs" in bench.origin
    with pytest.raises(ConfigError, match="the time to plan: too short to measure a layer with FLOPs"):
        _bench(nn.Sequential(nn.Identity(), nn.Linear(8, 8)), 2).prepare(_sizes(1), 0.0)


def test_a_few_equal_layers_are_measured_for_all() -> None:
    class Counted(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            ran.add(self)
            return super().forward(input)

    ran: set[nn.Module] = set()
    model = nn.Sequential(*(Counted(8, 8) for _ in range(100)))
    bench = _bench(model, 2, sample=LayerSample.of([0] * 99 + [1], (), most=3))
    bench.prepare(_sizes(2), time.monotonic() + 60)
    assert len(ran) == 5 and model[99] in ran
    costs = bench.costs(2, 2)
    assert costs.layers == 100
    assert costs.partition(0, 50).forward == pytest.approx(costs.partition(49, 99).forward)


def test_it_says_what_it_measures_next(capfd: pytest.CaptureFixture[str]) -> None:
    bench = _bench(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 2)
    bench.prepare(_sizes(1, 4), time.monotonic() + 60)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("measuring one device with the whole mini-batch (1 of 2 sizes, at most ")
    assert lines[1].startswith("measuring micro-batches of 1 (2 of 2 sizes")


def test_a_size_that_the_model_does_not_take_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    assert _bench(model, 2).prepare(_sizes(1, 4, 2), time.monotonic() + 60) == [4, 2]
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        _bench(model, 2).prepare(_sizes(4), time.monotonic() + 60)


def test_a_size_that_fails_keeps_no_tensors() -> None:
    """The traceback of its error kept those of the step that failed, so later sizes ran out of memory too."""
    kept: list[weakref.ref[torch.Tensor]] = []

    class Large(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output = input * 2
            if len(input) > 2:
                kept.append(weakref.ref(output))
                raise torch.OutOfMemoryError("out of memory")
            assert kept and not any(reference() is not None for reference in kept)
            return output

    model = nn.Sequential(nn.Linear(8, 8), Large())
    assert _bench(model, 2).prepare(_sizes(1, 2), time.monotonic() + 60) == [2]


def test_machines_of_their_own_do_not_disturb_each_other() -> None:
    bench = _bench(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 2, apart=True)
    bench.prepare(_sizes(2), time.monotonic() + 60)
    assert bench.costs(2, 1).partition(0, 2) == bench.costs(2, 2).partition(0, 2)


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    with use_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_message_takes_its_latency_and_its_bytes_over_the_bandwidth() -> None:
    assert TransferCost(0.5, 1e9).ms(2_000_000) == pytest.approx(2.5)


def test_latency_is_the_time_of_a_small_copy_and_bandwidth_that_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = {measured.SMALL: 0.001, measured.LARGE: 0.005}
    monkeypatch.setattr(measured, "_copy_seconds", lambda size, *_: taken[size])
    link = measure_link(CPU, CPU)
    assert link.latency_ms == 1.0
    assert link.ms(measured.LARGE - measured.SMALL) == pytest.approx(5.0)


@pytest.mark.accelerator
def test_partitions_that_go_there_and_back_are_moved_there(accelerators: list[torch.device]) -> None:
    """Before each step they were put on the devices in turn."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    plans = [
        Prediction(
            PlanShape(4, 2, 2, schedule, "never"),
            *((1, 1, 1, 1), 1.0, 1.0, 0.0, 8, ()),
            limit=Limit("work", 0.0, {}),
            engine="threads",
        )
        for schedule in (FixedOrder("v", zero_bubble_v(4, 2, 2)), "interleaved")
    ]
    batch = torch.randn(8, 4), torch.randn(8, 4)
    verified = verify_plans(
        plans, model, lambda size: batch, nn.functional.mse_loss, accelerators[:2], cores=2, seconds=60
    )
    assert all(plan.measured_ms is not None for plan in verified)
