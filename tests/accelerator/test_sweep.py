"""Pipes on accelerators give the bits of one device, in every schedule and checkpoint mode, without a stream race."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator.simulator import Simulator
from tests.accelerator.sweep import MODELS, Case, all_cases, differences, selected_cases

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize("case", list(selected_cases()), ids=str)
def test_a_pipe_gives_the_bits_of_one_device(accelerators: list[torch.device], case: Case) -> None:
    assert differences(case, accelerators) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", MODELS)
def test_every_pipe_gives_the_bits_of_one_device(accelerators: list[torch.device], model: str) -> None:
    different = {
        str(case): found
        for case in all_cases()
        if case.model == model and (found := differences(case, accelerators))
    }
    assert different == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", MODELS)
def test_every_pipe_gives_these_bits_where_kernels_run_late(simulated: Simulator, model: str) -> None:
    different = {}
    for seed, case in enumerate(case for case in all_cases() if case.model == model):
        with simulated.asynchronous(seed):
            if found := differences(case, simulated.devices):
                different[str(case)] = found
    assert different == {}
