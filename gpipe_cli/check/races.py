"""Whether torch's own sanitizer finds kernels of two streams that use a tensor in no fixed order.

It covers one device: the copies from and to the host on their streams, and a pipeline whose two workers share it.
Copies between two devices are beyond it; the sweep of tests/accelerator covers those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gpipe_cli.accelerator.copies import start_copy
from gpipe_cli.check.children import can_start_children, run_in_children
from gpipe_cli.check.row import Machine, Row, Verdict
from gpipe_cli.check.workload import small_batch, small_model
from gpipe_cli.launch.rank_files import RankFiles
from gpipe_cli.pipeline.gpipe import GPipe
from gpipe_cli.torch_internals.cuda_sanitizer import find_races, offers_sanitizer

NAME = "stream races"


def check_races(machine: Machine) -> Iterator[Row]:
    traced = [device for device in machine.accelerators if offers_sanitizer(device)]
    if not traced:
        yield Row(
            NAME, Verdict.SKIPPED, "torch offers its sanitizer only for GPUs, in builds for CUDA and ROCm"
        )
    elif not can_start_children():
        yield Row(NAME, Verdict.SKIPPED, "gpipe starts the process that the sanitizer needs on Linux only")
    else:
        yield judge_races(traced[0], run_in_children("races", traced[:1]))


def judge_races(device: torch.device, figures: Mapping[str, Any]) -> Row:
    if not figures["finds_deliberate_race"]:
        result = (
            "torch's sanitizer did not report a race that was made on purpose, so its silence proves nothing"
        )
        return Row(NAME, Verdict.NOTE, result, figures, "use the version of torch that gpipe was tested with")
    if not figures["races"]:
        result = f"torch's sanitizer reports none in copies and in a pipeline of two workers on {device}"
        return Row(NAME, Verdict.OK, result, figures)
    result = f"torch's sanitizer reports {len(figures['races'])} on {device}: {figures['races'][0]}"
    to_do = "results may change from run to run: open an issue with this output and that of gpipe env"
    return Row(NAME, Verdict.PROBLEM, result, figures, to_do)


def run_part(files: RankFiles, devices: Sequence[torch.device]) -> Mapping[str, Any]:
    (device,) = devices
    return {
        "finds_deliberate_race": bool(find_races(lambda: _race(device))),
        "races": find_races(lambda: _copy_and_train(device)),
    }


def _race(device: torch.device) -> None:
    """Two streams write to a tensor, and neither waits for the other."""
    tensor = torch.zeros(1024, device=device)
    torch.accelerator.synchronize(device)
    for value in (1.0, 2.0):
        with torch.Stream(device):
            tensor.fill_(value)


def _copy_and_train(device: torch.device) -> None:
    images, classes = (_copied(tensor, device) for tensor in small_batch(samples=16))
    model = small_model(blocks=4, dropout=0.1)
    with GPipe(model, [6, 6], devices=[device, device], chunks=4, schedule="1f1b") as pipe:
        loss = pipe.step(images, classes, cross_entropy, key=1)
    _copied(loss, torch.device("cpu"))


def _copied(tensor: Tensor, destination: torch.device) -> Tensor:
    (copied,) = start_copy((tensor,), destination).receive()
    assert copied is not None, "a tensor was sent"
    return copied
