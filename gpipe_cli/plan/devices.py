"""Devices that are not here: what their makers say of them. Pure Python, nothing is measured.

The figures are for fp32 without tensor cores, as torch multiplies unless told otherwise, and for the variant with the
fastest link. Sources: NVIDIA's data sheets of the products (Tesla P40, T4, V100 SXM2, A10, L4, A100 SXM, H100 SXM) and
white papers of the architectures (Ampere GA102, Ada AD102). A link is given one way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

__all__ = ["DEVICES", "Device"]

GIB = 2**30


@final
@dataclass(frozen=True)
class Device:
    flops: float
    """Per second, at most."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second to and from its memory."""
    link: float
    """Bytes per second to the next device."""


DEVICES: Mapping[str, Device] = {
    "p40": Device(11.76e12, 24 * GIB, 346e9, 12e9),  # PCIe 3.0 x16, 15.75 GB/s less its protocol
    "t4": Device(8.1e12, 16 * GIB, 320e9, 12e9),  # PCIe 3.0 x16
    "v100": Device(15.7e12, 32 * GIB, 900e9, 150e9),  # NVLink 2: 300 GB/s both ways together
    "rtx3090": Device(35.6e12, 24 * GIB, 936e9, 25e9),  # PCIe 4.0 x16, 31.5 GB/s less its protocol
    "a10": Device(31.2e12, 24 * GIB, 600e9, 25e9),  # PCIe 4.0 x16
    "a100": Device(19.5e12, 80 * GIB, 2039e9, 300e9),  # NVLink 3: 600 GB/s both ways together
    "rtx4090": Device(82.6e12, 24 * GIB, 1008e9, 25e9),  # PCIe 4.0 x16
    "l4": Device(30.3e12, 24 * GIB, 300e9, 25e9),  # PCIe 4.0 x16
    "h100": Device(66.9e12, 80 * GIB, 3352e9, 450e9),  # NVLink 4: 900 GB/s both ways together
}
