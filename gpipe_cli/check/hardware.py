"""Which devices there are, how much of their memory is free, whether their counters follow what is allocated, how fast
tensors move between devices and the host, and whether they arrive unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any, final

import torch

from gpipe_cli.accelerator.devices import (
    available_cores,
    compute_capability,
    device_name,
    free_and_total_bytes,
    has_peer_access,
    is_accelerator,
    peak_bytes,
    reads_pinned_memory,
    reset_peaks,
)
from gpipe_cli.accelerator.streams import median_seconds
from gpipe_cli.check.row import Machine, Row, Verdict, worst
from gpipe_cli.report.environment import memory_gib, processor_name
from gpipe_cli.report.formatting import format_value

LEAST_FREE = 0.5
"""The share of a device's memory below which other processes seem to use it."""
SIZE = 64 * 2**20
"""Bytes of the tensor that is counted; the allocators of accelerators round such sizes by less than SLACK."""
SLACK = 2 * 2**20
LARGE, SMALL = 64 * 2**20, 4 * 2**10
"""Bytes of the copies that bandwidth and latency are measured with."""
MAX_DEVICES_IN_PAIRS = 8
"""With more devices only neighbors are measured: a pipeline copies between neighbors."""
SLOW_HOST_LINK = 3.0
"""In GB/s; four PCIe 3.0 lanes reach as much."""
SLOW_SHARE = 0.75
"""The fraction of the host's links that direct copies between two devices reach, apart from noise."""
CPU = torch.device("cpu")


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
        "other processes use this device; end them, or remove it from devices=[...]" if in_use else "",
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


@final
@dataclass(frozen=True)
class CheckedLink:
    """One direction between two devices."""

    source: torch.device
    destination: torch.device
    latency_us: float
    gb_per_second: float
    intact: bool = True
    """Whether every byte arrived as it was sent."""
    peer_access: bool | None = None
    """Between accelerators: whether the devices can copy without the host; None if torch cannot tell."""
    pinned: bool | None = None
    """With the host: whether its memory was pinned."""

    def __str__(self) -> str:
        return f"{self.gb_per_second:.1f} GB/s, {self.latency_us:.0f} us"

    def figures(self) -> dict[str, Any]:
        return {**asdict(self), "source": str(self.source), "destination": str(self.destination)}


def check_links(machine: Machine) -> Iterator[Row]:
    if not machine.accelerators:
        yield _memory_row(check_link(CPU, CPU))
        return
    host: dict[torch.device, float] = {}
    for device in machine.accelerators:
        links = [
            check_link(*ends, pinned=pinned)
            for ends in ((CPU, device), (device, CPU))
            for pinned in ((True, False) if reads_pinned_memory([device]) else (False,))
        ]
        host[device] = _slower_direction(links)
        yield judge_host_links(device, links)
    pairs = list(pairs_to_measure(machine.accelerators))
    for source in machine.accelerators:
        destinations = [destination for first, destination in pairs if first == source]
        if destinations:
            yield judge_pairs(source, [check_link(source, each) for each in destinations], host)


def pairs_to_measure(devices: Sequence[torch.device]) -> Iterator[tuple[torch.device, torch.device]]:
    """Every ordered pair; of many devices only neighbors, where the last and the first are neighbors too."""
    apart = (1, len(devices) - 1)
    for first, second in permutations(range(len(devices)), 2):
        if len(devices) <= MAX_DEVICES_IN_PAIRS or abs(first - second) in apart:
            yield devices[first], devices[second]


def check_link(source: torch.device, destination: torch.device, *, pinned: bool | None = None) -> CheckedLink:
    """pinned: whether the host's side of the copy is pinned memory; None if neither side is the host."""
    # Each number occurs once, so that a piece in the wrong place is noticed too.
    sent = _allocate(source, pinned).copy_(torch.arange(LARGE // 4, dtype=torch.int32))
    received = _allocate(destination, pinned).zero_()
    ends = (source, destination)
    seconds = median_seconds(lambda: received.copy_(sent, non_blocking=True), ends)
    intact = torch.equal(received.to(CPU), sent.to(CPU))
    few, few_received = sent[: SMALL // 4], received[: SMALL // 4]
    latency = median_seconds(lambda: few_received.copy_(few, non_blocking=True), ends, repeats=25)
    peers = None if CPU in ends else has_peer_access(source, destination)
    return CheckedLink(source, destination, 1e6 * latency, LARGE / seconds / 1e9, intact, peers, pinned)


def _allocate(device: torch.device, pinned: bool | None) -> torch.Tensor:
    pin = bool(pinned) and device == CPU
    return torch.empty(LARGE // 4, dtype=torch.int32, device=device, pin_memory=pin)


def _memory_row(link: CheckedLink) -> Row:
    result = f"workers on one CPU hand tensors over without a copy; its memory copies {link}"
    if link.intact:
        return Row("links of cpu", Verdict.OK, result, {"links": [link.figures()]})
    return Row("links of cpu", Verdict.PROBLEM, result, {"links": [link.figures()]}, _changed([link]))


def judge_host_links(device: torch.device, links: Sequence[CheckedLink]) -> Row:
    name, figures = f"host and {device}", {"links": [link.figures() for link in links]}
    result = "; ".join(
        f"{'to' if link.source == CPU else 'from'} it {'pinned' if link.pinned else 'pageable'} {link}"
        for link in links
    )
    if not all(link.intact for link in links):
        return Row(name, Verdict.PROBLEM, result, figures, _changed(links))
    if _slower_direction(links) < SLOW_HOST_LINK:
        to_do = (
            f"copies below {SLOW_HOST_LINK:g} GB/s: check the slot's PCIe generation and lanes "
            "(NVIDIA: nvidia-smi -q -d PCIE), and that no other process uses the link"
        )
        return Row(name, Verdict.NOTE, result, figures, to_do)
    return Row(name, Verdict.OK, result, figures)


def _slower_direction(links: Sequence[CheckedLink]) -> float:
    """In GB/s, of the links between a device and the host; with pinned memory where the device reads it."""
    pinned = [link for link in links if link.pinned]
    return min(link.gb_per_second for link in pinned or links)


def judge_pairs(
    source: torch.device, links: Sequence[CheckedLink], host_gb_per_second: Mapping[torch.device, float]
) -> Row:
    """host_gb_per_second: by device, the slower direction of its link with the host."""
    verdicts, results = [], []
    for link in links:
        through_host = SLOW_SHARE * min(host_gb_per_second[end] for end in (source, link.destination))
        slow = link.peer_access is False or link.gb_per_second < through_host
        verdicts.append(Verdict.PROBLEM if not link.intact else Verdict.NOTE if slow else Verdict.OK)
        without = " without peer access" if link.peer_access is False else ""
        results.append(f"to {link.destination} {link}{without}")
    verdict = worst(verdicts)
    hints = {
        Verdict.PROBLEM: _changed(links),
        Verdict.NOTE: (
            "copies seem to go through the host: see which devices share a switch or NVLink (nvidia-smi topo -m), "
            "order 'devices=[...]' so that neighbors do, and check that PCIe access control (ACS) is off"
        ),
    }
    figures = {"links": [link.figures() for link in links]}
    return Row(f"links from {source}", verdict, "; ".join(results), figures, hints.get(verdict, ""))


def _changed(links: Sequence[CheckedLink]) -> str:
    broken = ", ".join(f"{link.source} to {link.destination}" for link in links if not link.intact)
    return (
        f"copies from {broken} arrive changed, and training would be wrong: turn the IOMMU or PCIe access control off, "
        "update the driver, or remove one of the devices from devices=[...]"
    )
