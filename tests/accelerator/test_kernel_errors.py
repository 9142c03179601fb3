from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.accelerator.device_errors import note_kernel_error, report_out_of_memory
from tests.support.command_line import Gpipe, UserModule

ASSERT = (
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API "
    "call, so the stacktrace below might be incorrect."
)
NOTE = (
    "the device reports errors of its kernels at a later call: the cause may be an earlier layer or action; to see "
    "which, run it again with {} in the environment"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ASSERT),
        RuntimeError(ASSERT),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("HIP error: an illegal memory access was encountered"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_an_error_of_a_kernel_says_that_its_place_is_late_and_how_to_find_the_cause(error: Exception) -> None:
    note_kernel_error(error)
    note_kernel_error(error)
    assert error.__notes__ == [NOTE.format("CUDA_LAUNCH_BLOCKING=1")]


@pytest.mark.parametrize(
    ("kind", "hip", "note"),
    [
        ("npu", None, NOTE.format("ASCEND_LAUNCH_BLOCKING=1")),
        ("cuda", "6.4", NOTE.format("AMD_SERIALIZE_KERNEL=3")),
        ("xpu", None, NOTE.partition(";")[0]),
    ],
)
def test_the_switch_is_that_of_the_accelerator(
    kind: str, hip: str | None, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type=kind))
    monkeypatch.setattr(torch.version, "hip", hip)
    error = torch.AcceleratorError(f"{kind.upper()} error: unspecified launch failure")
    note_kernel_error(error)
    assert error.__notes__ == [note]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes differ"), torch.AcceleratorError("CUDA error: out of memory"), ValueError(ASSERT)],
    ids=str,
)
def test_other_errors_get_no_such_note(error: Exception) -> None:
    note_kernel_error(error)
    assert not hasattr(error, "__notes__")


class Asserts(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        raise torch.AcceleratorError(ASSERT)


def test_an_error_of_a_kernel_reaches_the_caller_of_a_pipe_with_its_type_and_one_such_note() -> None:
    with (
        GPipe(nn.Sequential(nn.Linear(2, 2), Asserts()), [1, 1], devices=["cpu", "cpu"]) as pipe,
        pytest.raises(torch.AcceleratorError, match="device-side assert") as caught,
        report_out_of_memory(),
    ):
        pipe.step(torch.ones(2, 2), torch.ones(2, 2), nn.functional.mse_loss)
    assert caught.value.__notes__ == [
        "in partition 1, layer '1' (Asserts), micro-batch 0, action F1.0 (forward)",
        NOTE.format("CUDA_LAUNCH_BLOCKING=1"),
    ]


FAILING = """
import torch
from torch import nn


class Asserts(nn.Module):
    steps = 0

    def forward(self, input):
        self.steps += self.training
        if self.steps > 3:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return input


def build(num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes), Asserts())
"""


def test_a_run_ends_with_that_error_and_saves_nothing_from_the_device(
    gpipe: Gpipe, tmp_path: Path, user_module: UserModule
) -> None:
    user_module("asserting_model", FAILING)
    model = "model._target_=asserting_model.build allow=[asserting_model] data=synthetic data.shape=[3,8,8]"
    pipe = "chunks=1 partitions=2 checkpoint=never"
    answer = gpipe(*f"train {model} {pipe} snapshot.every=1 steps=9 run_dir=run".split())
    assert answer.code == 1 and NOTE.format("CUDA_LAUNCH_BLOCKING=1") in answer.err, answer.err
    assert sorted(path.name for path in (tmp_path / "run" / "snapshots").iterdir())[-1].endswith("3")
