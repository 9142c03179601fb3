"""Ranks on accelerators: every schedule gives what one process on one of them gives.

On simulated devices gloo carries the tensors, and results are equal to the bit. That shows that ranks put everything on
the right device. On real devices the ranks use the backend of their device.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed

from gpipe_cli.accelerator.devices import accelerators as accelerators_here
from gpipe_cli.accelerator.streams import set_current_device
from gpipe_cli.distributed import setup_process_groups
from gpipe_cli.distributed.groups import DATA, PIPE, backends_for
from tests.accelerator import simulator
from tests.distributed.cases import Case, CaseResult, run
from tests.distributed.staged import staged_through_the_cpu

RANKS = 2
CASES = [
    *(
        Case("perceptron", schedule, "except_last", optimizer="SGD")
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")
    ),
    Case("tied_without_dropout", "1f1b", optimizer="SGD"),
    Case("odd_borders", "zero_bubble", "always", optimizer="SGD"),
]


def rank_on_accelerator(rank: int, folder: Path) -> None:
    """What one rank does, in an interpreter of its own: a device cannot be used in a forked process."""
    build = os.environ.get("GPIPE_TESTS_SIMULATE")
    with ExitStack() as stack:
        if build is not None:
            simulator.load(build)  # type: ignore[arg-type]
            stack.enter_context(staged_through_the_cpu())
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        devices = accelerators_here()[:RANKS]
        device = devices[rank]
        set_current_device(device)
        distributed.init_process_group(
            f"cpu:gloo,{build}:gloo" if build is not None else backends_for(device),
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=RANKS,
            device_id=None if build is not None else device,
        )
        setup_process_groups([(DATA, 1), (PIPE, RANKS)])
        for case in CASES:
            engine = case.on_ranks(RANKS, devices)
            assert {parameter.device for parameter in engine.module.parameters()} <= {
                device,
                torch.device("meta"),
            }
            _save(folder / f"{case.name}-{rank}.safetensors", run(case, engine, case.batch))
        distributed.destroy_process_group()
        loaded = simulator.loaded()
        assert loaded is None or loaded.races() == []


def _save(path: Path, result: CaseResult) -> None:
    losses = torch.tensor([facts["loss"] for facts in result.facts], dtype=torch.float64)
    # Cloned, because tied parameters share their memory.
    tensors = {name: tensor.cpu().clone() for name, tensor in result.state.model.items()}
    save_file({"losses": losses, **tensors}, path)


@pytest.mark.accelerator
@pytest.mark.slow
def test_ranks_on_accelerators_train_as_one_process_does(
    accelerators: list[torch.device], tmp_path: Path
) -> None:
    if len(accelerators) < RANKS:
        pytest.skip(f"needs {RANKS} accelerators")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=rank_on_accelerator, args=(rank, tmp_path), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
    assert codes == [0] * RANKS
    torch.set_num_threads(1)
    exact = {"rtol": 0.0, "atol": 0.0} if simulator.loaded() is not None else {}
    for case in CASES:
        ours = load_file(tmp_path / f"{case.name}-0.safetensors")
        _save(tmp_path / "alone", run(case, case.alone(accelerators[0]), case.batch))
        expected = load_file(tmp_path / "alone")
        assert ours.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(ours[name], expected[name], **exact)
