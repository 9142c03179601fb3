"""What torchgpipe's users write works here, or says what to write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli import GPipe
from gpipe_cli.balance import balance_by_size, balance_by_time

pytestmark = pytest.mark.timeout(60)


def five_linears() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))


def test_balance_by_size_takes_the_partitions_first_too() -> None:
    """torchgpipe's later order gave "'int' object has no attribute ..."."""
    model, sample = five_linears(), torch.ones(2, 4)
    assert balance_by_size(4, model, sample) == balance_by_size(model, sample, 4)
    assert balance_by_size(2, model, sample, chunks=2, param_scale=3.0) == balance_by_size(
        model, sample, 2, chunks=2, param_scale=3.0
    )


def test_balance_by_time_takes_the_partitions_first_too() -> None:
    balance = balance_by_time(4, five_linears(), torch.ones(2, 4), timeout=0.01)
    assert len(balance) == 4
    assert sum(balance) == 5


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the machine has devices with numbers")
def test_numbered_devices_are_an_error_on_a_machine_without_them() -> None:
    """They became CPU workers in silence."""
    with pytest.raises((ValueError, IndexError, RuntimeError), match="4"):
        GPipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], devices=[4, 5])
