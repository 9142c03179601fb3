"""Which devices there are, and how much of their memory is free."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from gpipe_cli.accelerator.device_facts import compute_capability, free_and_total_bytes
from gpipe_cli.accelerator.devices import available_cores, device_name, is_accelerator
from gpipe_cli.check.row import Machine, Row, Verdict
from gpipe_cli.report.environment import memory_gib, processor_name
from gpipe_cli.report.formatting import format_value

LEAST_FREE = 0.5
"""The share of a device's memory below which other processes seem to use it."""


def check_devices(machine: Machine) -> Iterator[Row]:
    for device in machine.devices:
        yield _accelerator(device) if is_accelerator(device) else _cpu(device)


def _accelerator(device: torch.device) -> Row:
    name, capability = device_name(device), compute_capability(device)
    free, total = free_and_total_bytes(device) or (None, None)
    parts = [name] if capability is None else [name, f"compute capability {capability}"]
    if free is None or total is None:
        parts.append("torch cannot count its memory")
    else:
        parts.append(f"{format_value('bytes', free)} of {format_value('bytes', total)} free")
    in_use = free is not None and total is not None and free < LEAST_FREE * total
    return Row(
        f"device {device}",
        Verdict.NOTE if in_use else Verdict.OK,
        ", ".join(parts),
        {"device": name, "capability": capability, "free_bytes": free, "total_bytes": total},
        "other processes use this device; end them, or leave it out of devices=[...]" if in_use else "",
    )


def _cpu(device: torch.device) -> Row:
    cores, memory = available_cores(), memory_gib()
    figures = {
        "device": processor_name(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_gib": memory,
    }
    of_all = "" if cores == os.cpu_count() else f" of {os.cpu_count()}"
    size = "" if memory is None else f", {memory} GiB of memory"
    result = f"{processor_name() or 'CPU'}, {cores}{of_all} cores{size}"
    if cores > 1:
        return Row(f"device {device}", Verdict.OK, result, figures)
    to_do = "one core runs workers in turn: give the process a second one for a pipeline that gains time"
    return Row(f"device {device}", Verdict.NOTE, result, figures, to_do)
