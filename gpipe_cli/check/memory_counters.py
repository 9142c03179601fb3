"""Whether a device's memory counters follow what is allocated: reports and plans rely on them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpipe_cli.accelerator.counters import peak_bytes, reset_peaks
from gpipe_cli.check.row import Machine, Row, Verdict
from gpipe_cli.report.formatting import format_value

SIZE = 64 * 2**20
"""Bytes; the allocators of accelerators round such sizes by less than SLACK."""
SLACK = 2 * 2**20


def check_counters(machine: Machine) -> Iterator[Row]:
    for device in machine.accelerators:
        counts = count_allocation(device)
        if counts is None:
            yield Row(
                f"memory counters of {device}", Verdict.SKIPPED, "torch counts no memory on this device"
            )
        else:
            yield judge_counters(device, *counts)
    if not machine.accelerators:
        yield Row("memory counters", Verdict.SKIPPED, "a CPU has none: gpipe estimates memory there")


def count_allocation(device: torch.device) -> tuple[int, int, int] | None:
    """By how many bytes the counters rose: with the tensor, after it was freed, and at the peak; None without any."""
    reset_peaks([device])
    before = peak_bytes(device)
    if before is None:
        return None
    tensor = torch.empty(SIZE, dtype=torch.uint8, device=device)
    held = torch.accelerator.memory_allocated(device)
    del tensor
    after, peak = torch.accelerator.memory_allocated(device), peak_bytes(device)
    return held - before, after - before, (peak or 0) - before


def judge_counters(device: torch.device, held: int, after: int, peak: int) -> Row:
    counted = [abs(held - SIZE) <= SLACK, abs(after) <= SLACK, abs(peak - SIZE) <= SLACK]
    size, *shown = (format_value("bytes", number) for number in (SIZE, held, after, peak))
    result = f"a tensor of {size} counts {shown[0]}, its peak {shown[2]}, after it is freed {shown[1]}"
    figures = {"allocated_bytes": SIZE, "held_bytes": held, "freed_bytes": after, "peak_bytes": peak}
    if all(counted):
        return Row(f"memory counters of {device}", Verdict.OK, result, figures)
    to_do = (
        "gpipe cannot measure memory on this device: unset PYTORCH_NO_CUDA_MEMORY_CACHING and replaced allocators, and "
        "trust the estimates of gpipe profile instead"
    )
    return Row(f"memory counters of {device}", Verdict.PROBLEM, result, figures, to_do)
