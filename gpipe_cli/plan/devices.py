"""Devices you need not have: their manufacturers' figures, and what layers would cost on them. Nothing is measured.

The figures are for fp32 without tensor cores, torch's default, and for the variant with the fastest link, one way.
Sources: NVIDIA's data sheets of the products (Tesla P40, T4, V100 SXM2, A10, L4, A100 SXM, H100 SXM) and its white
papers of the architectures (Ampere GA102, Ada AD102).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpipe_cli.plan.costs import BackwardSplit, LayerCosts

if TYPE_CHECKING:  # the configuration reads the table of devices without waiting for torch
    from torch import nn

    from gpipe_cli.profiling.facts import ModelFacts

GIB = 2**30
# The shares of its figures that a device reaches: the same for every device, fitted to no measurement, and the largest
# source of error.
FLOPS_REACHED = 0.6
BANDWIDTH_REACHED = 0.75
KERNEL_MS = 0.008
"""To launch one; a module without submodules counts as one kernel in forward and two in backward."""


@final
@dataclass(frozen=True)
class DeviceSpec:
    flops: float
    """Floating-point operations per second, at most."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second to and from its memory."""
    link: float
    """Bytes per second to the next device."""


DEVICES: Mapping[str, DeviceSpec] = {
    "p40": DeviceSpec(11.76e12, 24 * GIB, 346e9, 12e9),  # PCIe 3.0 x16, 15.75 GB/s less its protocol
    "t4": DeviceSpec(8.1e12, 16 * GIB, 320e9, 12e9),  # PCIe 3.0 x16
    "v100": DeviceSpec(15.7e12, 32 * GIB, 900e9, 150e9),  # NVLink 2: 300 GB/s both ways together
    "rtx3090": DeviceSpec(35.6e12, 24 * GIB, 936e9, 25e9),  # PCIe 4.0 x16, 31.5 GB/s less its protocol
    "a10": DeviceSpec(31.2e12, 24 * GIB, 600e9, 25e9),  # PCIe 4.0 x16
    "a100": DeviceSpec(19.5e12, 80 * GIB, 2039e9, 300e9),  # NVLink 3: 600 GB/s both ways together
    "rtx4090": DeviceSpec(82.6e12, 24 * GIB, 1008e9, 25e9),  # PCIe 4.0 x16
    "l4": DeviceSpec(30.3e12, 24 * GIB, 300e9, 25e9),  # PCIe 4.0 x16
    "h100": DeviceSpec(66.9e12, 80 * GIB, 3352e9, 450e9),  # NVLink 4: 900 GB/s both ways together
}


def estimate_costs(
    module: Sequence[nn.Module], facts: ModelFacts, device: DeviceSpec, scale: float = 1.0
) -> LayerCosts:
    """The costs of a micro-batch with `scale` times the rows of the one the facts are of, by the roofline model.

    A layer takes as long as the slower of its arithmetic and its memory traffic, plus a little for each kernel launch.
    """
    flops, bandwidth = FLOPS_REACHED * device.flops, BANDWIDTH_REACHED * device.bandwidth
    forward: list[float] = []
    backward: list[float] = []
    weight_grad: list[float] = []
    input_bytes = facts.input.bytes
    for layer, layer_facts, layer_flops in zip(module, facts.layers, facts.flops, strict=True):
        trained = sum(parameter.nbytes for parameter in layer.parameters() if parameter.requires_grad)
        kernels = KERNEL_MS * sum(not list(submodule.children()) for submodule in layer.modules())
        # Forward reads the input and writes what it saves, at least the output; backward moves the same again and the
        # gradients of both.
        moved = scale * (input_bytes + max(layer_facts.saved_bytes, layer_facts.output_bytes))
        weights = layer_facts.parameter_bytes
        traffic, traffic_back = (moved + weights) / bandwidth, (2 * moved + weights + trained) / bandwidth
        forward.append(1000 * max(scale * layer_flops.forward / flops, traffic) + kernels)
        both = 1000 * max(scale * layer_flops.backward / flops, traffic_back) + 2 * kernels
        backward.append(both if layer_facts.index >= facts.frozen_layers else 0.0)
        weight_grad.append(backward[-1] / 2 * (trained / weights if weights else 1.0))
        input_bytes = layer_facts.output_bytes
    transfer = [1000 * scale * facts.boundary(end).bytes / device.link for end in range(1, len(module) + 1)]
    share = sum(weight_grad) / sum(backward) if any(backward) else 0.5
    split = BackwardSplit(1 - share, share)
    return LayerCosts(forward, backward, transfer=transfer, split=split, frozen_layers=facts.frozen_layers)
