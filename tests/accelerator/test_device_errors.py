from __future__ import annotations

import errno
import re
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli import GPipe
from gpipe_cli.accelerator import devices
from gpipe_cli.accelerator.device_errors import STEP_HINT, note_device, report_out_of_memory
from gpipe_cli.errors import ResourceError
from gpipe_cli.pipeline import channels

CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: "


class OutOfMemoryError(RuntimeError):
    """By the name of torch's own."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "out of memory while reading; read less"),
        (
            RuntimeError(f"{CPU}can't allocate memory: you tried to allocate 12 bytes."),
            ": cannot allocate 12 bytes;",
        ),
        (
            RuntimeError(f"{CPU}not enough memory: you tried to allocate 12 bytes."),
            ": cannot allocate 12 bytes;",
        ),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), ": cannot allocate 2.00 GiB;"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory while reading; read less"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            ": failed to map segment;",
        ),
        (RuntimeError("can't start new thread"), ": can't start new thread;"),
        (
            RuntimeError("Storage size calculation overflowed with sizes=[9]"),
            "Storage size calculation overflowed;",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_memory_that_runs_out_becomes_a_resource_error(error: Exception, says: str) -> None:
    error.add_note("layer 3")
    with pytest.raises(ResourceError) as caught, report_out_of_memory("reading", "read less"):
        raise error
    assert says in str(caught.value) and caught.value.__notes__ == ["layer 3"]


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), OSError(errno.ENOENT, "no"), ImportError("x")]
)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, report_out_of_memory():
        raise error
    assert raised.value is error


DEVICES = [torch.device("cuda", index) for index in range(2)]
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 16.00 GiB."


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: DEVICES)
    monkeypatch.setattr(devices, "free_and_total_bytes", lambda device: (2**30, 2**34))


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            OutOfMemoryError(FULL),
            "on cuda:1 (1GiB of 16GiB free), which holds partitions 1, 3: cannot allocate 2.00 GiB; ",
        ),
        (
            OutOfMemoryError(f"{FULL[:-1]} of which 0.25 GiB is free."),
            "on cuda:1 (0.25 GiB of 16.00 GiB free), which holds partitions 1, 3: cannot allocate 2.00 GiB; ",
        ),
        (RuntimeError("CUDA error: out of memory"), "out of memory; "),
        (OutOfMemoryError("sim out of memory. Tried to allocate 5.00 MiB."), ": cannot allocate 5.00 MiB; "),
    ],
    ids=["cuda", "its own count", "driver", "another kind"],
)
def test_an_accelerator_that_is_full_is_named_with_its_partitions(error: Exception, says: str) -> None:
    partitions = dict(enumerate(DEVICES * 2))
    with pytest.raises(ResourceError, match=re.escape(says)), report_out_of_memory(partitions=partitions):
        raise error


@pytest.mark.usefixtures("two_devices")
def test_a_device_that_a_note_has_named_is_not_named_again() -> None:
    with pytest.raises(ResourceError) as caught, report_out_of_memory(), note_device("moving it", DEVICES[1]):
        raise OutOfMemoryError(FULL)
    assert str(caught.value).partition("\n")[0] == f"out of memory: cannot allocate 2.00 GiB; {STEP_HINT}"
    assert caught.value.__notes__ == ["while moving it on cuda:1 (1GiB of 16GiB free)"]


def test_the_only_device_needs_no_name_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: [torch.device("mps", 0)])
    monkeypatch.setattr(devices, "free_and_total_bytes", lambda device: None)
    text = "MPS backend out of memory (MPS allocated: 2.00 GiB). Tried to allocate 3.00 GB on private pool."
    says = re.escape("out of memory on mps:0: cannot allocate 3.00 GB; ")
    with pytest.raises(ResourceError, match=says), report_out_of_memory():
        raise RuntimeError(text)


def test_a_copy_that_does_not_fit_is_blamed_on_the_partition_that_receives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is allocated while the sender's action runs, which the note on the error used to name."""

    def full(tensors: Any, device: torch.device, *, timed: bool) -> Any:
        raise OutOfMemoryError(FULL)

    monkeypatch.setattr(channels, "start_copy", full)
    with (
        GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu", "cpu"]) as pipe,
        pytest.raises(OutOfMemoryError) as caught,
    ):
        pipe.step(torch.ones(2, 2), torch.ones(2, 2), nn.functional.mse_loss)
    assert caught.value.__notes__ == [
        "while copying to partition 1",
        "sent by partition 0, micro-batch 0, action F0.0",
    ]
