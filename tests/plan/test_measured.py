from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_cli.plan.measured import CostMeasurer, intra_op_threads
from gpipe_cli.plan.search_space import PlanShape
from gpipe_cli.profiling.cache import ProfileCache
from gpipe_cli.profiling.layers import Sample

CPU = torch.device("cpu")


def _bench(
    model: nn.Sequential, devices: int, *, apart: bool = False, say: Callable[[str], None] = print
) -> CostMeasurer:
    input, target = torch.randn(4, 8), torch.randn(4, 8)

    def sample(chunks: int) -> Sample:
        return Sample(input[: 4 // chunks], target[: 4 // chunks], functional.mse_loss)

    return CostMeasurer(model, sample, [CPU] * devices, ProfileCache(None), cores=2, apart=apart, say=say)


def test_every_size_for_which_there_is_time_has_its_costs() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    bench = _bench(model, 2)
    assert sorted(bench.measure([1, 2, 4], time.monotonic() + 60)) == [1, 2, 4]
    for checkpoint in ("never", "always"):
        alone = bench.costs(PlanShape(1, 1, 1, "1f1b", checkpoint)).partition(0, 3)
        pipe = bench.costs(PlanShape(2, 2, 4, "1f1b", checkpoint)).partition(0, 3)
        assert min(alone.forward, alone.backward, pipe.forward, pipe.backward, pipe.recompute) > 0


def test_without_time_the_plain_run_is_measured_alone() -> None:
    assert _bench(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 2).measure([1, 2, 4], 0.0) == [1]


def test_it_says_what_it_measures_next_and_begins_with_the_plain_run() -> None:
    lines: list[str] = []
    bench = _bench(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 2, say=lines.append)
    assert bench.measure([1, 2, 4], time.monotonic() + 60) == [1, 4, 2]
    assert lines[0].startswith("measuring one device with the whole mini-batch (1 of 3 sizes, at most ")
    assert lines[1].startswith("measuring chunks=4 (2 of 3 sizes")


def test_a_size_that_the_model_does_not_take_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    assert sorted(_bench(model, 2).measure([1, 2, 4], time.monotonic() + 60)) == [1, 2]
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        _bench(model, 2).measure([4], time.monotonic() + 60)


def test_machines_of_their_own_do_not_disturb_each_other() -> None:
    bench = _bench(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 2, apart=True)
    bench.measure([2], time.monotonic() + 60)
    alone, pipe = (bench.costs(PlanShape(many, many, 2, "1f1b", "never")) for many in (1, 2))
    assert alone.partition(0, 2) == pipe.partition(0, 2)


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    with intra_op_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
