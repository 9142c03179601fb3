"""Whether a device's memory counters follow what is allocated: reports and plans rely on them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpipe_cli.check.row import Machine, Row, Verdict
from gpipe_cli.report.formatting import format_value

SIZE = 64 * 2**20
"""Bytes; the allocators of accelerators round such sizes by less than SLACK."""
SLACK = 2 * 2**20


def check_counters(machine: Machine) -> Iterator[Row]:
    for device in machine.accelerators:
        yield judge_counters(device, *count_allocation(device))
    if not machine.accelerators:
        yield Row("memory counters", Verdict.SKIPPED, "a CPU has none: gpipe estimates memory there")


def count_allocation(device: torch.device) -> tuple[int, int, int]:
    """By how many bytes the counters rose: with the tensor, after it was freed, and at the peak."""
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    tensor = torch.empty(SIZE, dtype=torch.uint8, device=device)
    held = torch.accelerator.memory_allocated(device)
    del tensor
    after = torch.accelerator.memory_allocated(device)
    peak = torch.accelerator.max_memory_allocated(device)
    return held - before, after - before, peak - before


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
