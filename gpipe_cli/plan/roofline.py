"""What layers would cost on a device that is not here: an estimate from operations and bytes, nothing is run.

A layer takes as long as the slower of its arithmetic and its traffic to memory, and a little for each kernel that is
started. Decides how much of its maker's figures a device reaches; those shares are the same for every device, are not
fitted to any measurement, and are the largest doubt about the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gpipe_cli.plan.costs import Costs
from gpipe_cli.plan.devices import Device
from gpipe_cli.profiling.facts import ModelFacts

__all__ = ["estimate"]

FLOPS_REACHED = 0.6
BANDWIDTH_REACHED = 0.75
KERNEL_MS = 0.008
"""To start one; a module that holds no other is taken as one there and two back."""


def estimate(module: Sequence[nn.Module], facts: ModelFacts, device: Device, scale: float = 1.0) -> Costs:
    """Of a micro-batch that has `scale` times the rows of the one the facts are of."""
    flops, bandwidth = FLOPS_REACHED * device.flops, BANDWIDTH_REACHED * device.bandwidth
    forward, backward = [], []
    entering = facts.input.bytes
    for layer, seen, counted in zip(module, facts.layers, facts.flops, strict=True):
        kernels = KERNEL_MS * sum(not list(one.children()) for one in layer.modules())
        # Read the input and write what is kept, the output at least; back, the same and the gradients of both.
        moved = scale * (entering + max(seen.saved_bytes, seen.output_bytes))
        there = max(scale * counted.forward / flops, (moved + seen.parameter_bytes) / bandwidth)
        back = max(scale * counted.backward / flops, 2 * (moved + seen.parameter_bytes) / bandwidth)
        forward.append(1000 * there + kernels)
        backward.append(1000 * back + 2 * kernels)
        entering = seen.output_bytes
    transfer = [1000 * scale * facts.boundary(end).bytes / device.link for end in range(1, len(module) + 1)]
    return Costs(forward, backward, transfer=transfer)
