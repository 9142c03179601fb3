from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.balance.manual import balance as manual
from gpipe_cli.balance.params import balance as by_params
from gpipe_cli.balance.result import Balanced
from gpipe_cli.balance.time import balance as by_time
from gpipe_cli.balance.uniform import balance as uniform
from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling.layers import Sample


def test_uniform_spreads_the_remainder_evenly() -> None:
    assert uniform(11, 4).layers == [3, 3, 3, 2]
    assert uniform(3, 3).layers == [1, 1, 1]


def test_manual_is_taken_as_given_if_it_covers_the_model() -> None:
    assert manual(5, [1, 4]).layers == [1, 4]
    with pytest.raises(ConfigError, match="covers 4 layers, the model has 5"):
        manual(5, [2, 2])


def test_params_makes_the_largest_partition_as_small_as_possible() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)), nn.Linear(4, 12, bias=False))
    balanced = by_params(module, 2)
    assert balanced.layers == [3, 1]
    assert balanced.sums == [48, 48]
    assert balanced.imbalance == 1


class Slow(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        time.sleep(0.01)
        return input * 1


def test_time_gives_slow_layers_a_partition_of_their_own() -> None:
    module = nn.Sequential(nn.Identity(), nn.Identity(), Slow(), Slow(), nn.Identity())
    balanced = by_time(module, Sample(torch.randn(2, 2, requires_grad=True)), 2, seconds=0)
    assert balanced.layers == [3, 2]
    assert balanced.unit == "ms" and balanced.sums[0] > 9


def test_figures_of_a_balance_are_of_its_partitions() -> None:
    balanced = Balanced([1, 3], [4.0, 1.0, 1.0, 2.0], "ms")
    assert balanced.sums == [4.0, 4.0]
    assert (balanced.largest, balanced.lower_bound, balanced.imbalance) == (4.0, 4.0, 1.0)
    assert Balanced([3, 1], [4.0, 1.0, 1.0, 2.0], "ms").lower_bound == 4.0
