"""Random pipes give the bits of the CPU on simulated devices: see tests/random_pipes for what they are made of."""

from __future__ import annotations

import pytest
from torch import nn

from gpipe_cli import GPipe
from gpipe_cli.torch_internals.tensors import exchanges_memory
from tests.accelerator.simulator import Simulator
from tests.random_pipes.case import RandomPipe, random_pipe
from tests.random_pipes.compare import WRITTEN, differences
from tests.random_pipes.run import run_pipe

pytestmark = pytest.mark.accelerator


def is_compared(case: RandomPipe, simulated: Simulator) -> bool:
    """Not with the CPU's autocast, with cells that have another kernel on accelerators, with refused hooks,
    or with a refused write to a buffer that a copy to another device may still read.
    """
    dropped = case.hooked and not exchanges_memory(simulated.devices[0])
    return not (case.autocast or {"gru", "lstm"} & {*case.layers} or dropped or case.shares_state)


def mismatches(seed: int, simulated: Simulator) -> list[str]:
    case = random_pipe(seed)
    if not is_compared(case, simulated):
        return []
    expected = run_pipe(case, whole=False)
    given = run_pipe(case, whole=False, devices=simulated.devices)
    if not given.errors and any(WRITTEN in str(error) for error in expected.errors):
        return []  # what one partition writes, another has a copy of
    return [f"seed {seed}: {line}" for line in differences(expected, given)]


def test_hooks_that_torch_would_drop_with_the_parameter_are_refused(simulated: Simulator) -> None:
    device = simulated.devices[0]
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda gradient: gradient)
    if exchanges_memory(device):
        assert GPipe(nn.Sequential(layer), [1], devices=[device]).module[0].weight is layer.weight
        return
    with pytest.raises(
        ValueError, match=r"^parameter 'weight' of Linear has hooks, which torch drops .* to sim;"
    ):
        GPipe(nn.Sequential(layer), [1], devices=[device])


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_a_random_pipe_gives_the_bits_of_the_cpu(simulated: Simulator, first: int) -> None:
    assert [line for seed in range(first, first + 10) for line in mismatches(seed, simulated)] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, 1000, 40))
def test_many_random_pipes_give_the_bits_of_the_cpu(simulated: Simulator, first: int) -> None:
    assert [line for seed in range(first, first + 40) for line in mismatches(seed, simulated)] == []
