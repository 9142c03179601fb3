"""Memory that runs out on an accelerator, in every phase of a run: exit code 6, where, how much, and what to try."""

from __future__ import annotations

import gc
import re
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.engines import offload, single, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec, TrainingObjective
from gpipe_cli.errors import ResourceError
from gpipe_cli.losses.measures import accuracy
from gpipe_cli.profiling.records import Sample
from gpipe_cli.report.formatting import describe
from tests.accelerator.simulator import Simulator
from tests.support.command_line import Gpipe

pytestmark = pytest.mark.accelerator

WEIGHT = 256 * 256 * 4
FREE = r"\([\d.]+ MiB of [\d.]+ MiB free\)"


@pytest.fixture
def held(simulated: Simulator) -> int:
    """The bytes of earlier tests on the fullest device."""
    gc.collect()
    return max(map(torch.accelerator.memory_allocated, simulated.devices))


ENGINES = {"single": single.build, "threads": threads.build, "offload": partial(offload.build, slices=4)}


def make_engine(simulated: Simulator, folder: Path, name: str) -> Engine:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    task = TrainingObjective(nn.CrossEntropyLoss(), accuracy, partial(torch.optim.AdamW, lr=0.1))
    input, target = batch()
    spec = EngineSpec(
        module,
        task,
        [4, 4] if name == "threads" else [8],
        simulated.devices[: 2 if name == "threads" else 1],
        chunks=2,
        eval_chunks=2,
        scratch=folder,
        make_sample=lambda: Sample(input[:8], target[:8], task.loss),
    )
    return ENGINES[name](spec)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 256), torch.randint(256, (16,))


@pytest.mark.parametrize(
    ("name", "weights", "says"),
    [
        (
            "threads",
            6,
            rf"cannot allocate 0.25 MiB; try more chunks, checkpoint=always, balance=size or more devices "
            rf"\(in partition [01] on \w+:[01] {FREE}, layer.*\(backward\)\)",
        ),
        ("threads", 11, rf"while updating the parameters on \w+:0 {FREE}, which holds partition 0: cannot"),
        (
            "single",
            12,
            rf"; try more chunks, a smaller batch_size, .*\(in partition 0 on \w+:0 {FREE}, layer.*\(backward\)\)",
        ),
        ("single", 20, rf"while updating the parameters on \w+:0 {FREE}, which holds partition 0: cannot"),
        (
            "offload",
            6.58,
            rf"cannot allocate 0.25 MiB; try more engine.slices .*\(in partition 3 on \w+:0 {FREE}, layer.*backward",
        ),
        (
            "offload",
            8,
            rf"cannot .*; try more engine.slices .*\(in partition 3 on \w+:0 {FREE}, while updating its parameters\)",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_step_names_device_partition_phase_and_what_fits_the_engine(
    name: str, weights: float, says: str, simulated: Simulator, held: int, tmp_path: Path
) -> None:
    """weights: how many of them have room. The model has 8; then come their gradients, then two states of each."""
    with (
        closing(make_engine(simulated, tmp_path, name)) as engine,
        simulated.memory_limit(held + int(weights * WEIGHT)),
        pytest.raises(ResourceError) as caught,
    ):
        engine.train_step(batch(), key=1, lr=0.1)
    assert re.search(says, describe(caught.value)), describe(caught.value)


def test_an_evaluation_is_told_of_eval_chunks(simulated: Simulator, tmp_path: Path) -> None:
    with closing(make_engine(simulated, tmp_path, "single")) as engine:
        held = torch.accelerator.memory_allocated(simulated.devices[0])
        with simulated.memory_limit(held + 30_000), pytest.raises(ResourceError) as caught:
            engine.eval_step(batch())
    assert re.search(r"while evaluating.*: cannot allocate .*; try more eval_chunks", describe(caught.value))


def test_a_full_receiver_is_named_not_the_sender(simulated: Simulator) -> None:
    """The memory of a copy is allocated while the sender's action runs, and used to be blamed on it."""
    first, second = simulated.devices[:2]
    with GPipe(
        nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 8)), [1, 1], devices=[first, second]
    ) as pipe:
        room = max(map(torch.accelerator.memory_allocated, (first, second))) + 2**20
        used = torch.accelerator.memory_allocated(second)
        ballast = torch.empty(room - used - 1000, device=second, dtype=torch.uint8)
        input, target = torch.randn(16, 8, device=first), torch.randn(16, 8, device=second)
        with simulated.memory_limit(room), pytest.raises(torch.OutOfMemoryError) as caught:
            pipe.step(input, target, nn.functional.mse_loss)
        del ballast
    receiver, sender = caught.value.__notes__
    assert re.fullmatch(rf"while copying to partition 1 on \w+:1 {FREE}", receiver)
    assert sender == "sent by partition 0, micro-batch 0, action F0.0"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("devices=2", rf"; try balance=size, more devices, .*while moving partition [01] on \w+:[01] {FREE}"),
        ("engine=single devices=1", rf"; try engine=threads .*while moving partition 0 on \w+:0 {FREE}"),
        ("engine=offload engine.slices=2 devices=1", rf"on \w+:0 {FREE}: cannot .*; try more engine.slices"),
    ],
)
def test_a_model_that_does_not_fit_ends_the_command_with_exit_code_6(
    words: str, says: str, simulated: Simulator, held: int, gpipe: Gpipe
) -> None:
    with simulated.memory_limit(held + 2**20):
        answer = gpipe(*f"train model=mlp model.width=512 data=synthetic steps=1 {words}".split())
    assert answer.code == 6 and "out of memory while building engine and optimizer" in answer.err
    assert re.search(says, answer.err), answer.err


LARGE = "model=mlp model.width=256 model.depth=40 data=synthetic batch_size=8"
"""10 MiB of equal layers and 3 MiB before them. Training with momentum takes three times as much, measuring twice."""


def test_a_model_larger_than_any_device_is_planned(simulated: Simulator, held: int, gpipe: Gpipe) -> None:
    with simulated.memory_limit(held + 24 * 2**20):
        answer = gpipe("plan", *LARGE.split(), "devices=2", "optimizer=sgd", "chunks=2", "--json")
    assert answer.code == 0, answer.err
    assert {plan["devices"] for plan in answer.json["candidates"]} == {2}, "one device has too little memory"


def test_what_cannot_be_measured_on_one_device_can_be_counted(
    simulated: Simulator, held: int, gpipe: Gpipe
) -> None:
    with simulated.memory_limit(held + 11 * 2**20):
        answer = gpipe("profile", *LARGE.split(), "devices=2")
        assert answer.code == 6 and "try more chunks, or measure=false, which counts" in answer.err
        assert gpipe("profile", *LARGE.split(), "devices=2", "measure=false").code == 0
