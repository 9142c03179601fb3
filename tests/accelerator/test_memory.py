from __future__ import annotations

import errno

import pytest

from gpipe_cli.accelerator.memory import report_out_of_memory
from gpipe_cli.errors import ResourceError

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
