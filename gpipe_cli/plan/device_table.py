"""Devices you need not have: their makers' figures, of which `estimated` makes times, and what is known of them.

The figures are dense (without sparsity) and for the variant with the fastest link, one way. Sources: the data sheets of
the products (Tesla P40, Tesla P100 PCIe, T4, V100 SXM2, A10, L4, L40S, A100 SXM 80 GB, H100 SXM, H200 SXM, HGX B200,
Instinct MI300X) and NVIDIA's white papers of the architectures (Ampere GA102, Ada AD102, Blackwell RTX). PCIe counts
without its protocol: 12 of 15.75 GB/s for 3.0 x16, 25 of 31.5 for 4.0, 50 of 63 for 5.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, final

from gpipe_cli.errors import ConfigError, did_you_mean, or_list
from gpipe_cli.values import parse_bytes

GIB = 2**30
NEEDED = ("flops", "memory", "bandwidth", "link")
"""The figures that a custom device must have."""
OPTIONAL = ("half", "tensor", "tf32", "sustained")
"""Figures that null takes away."""


@final
@dataclass(frozen=True)
class DeviceSpec:
    flops: float
    """Floating-point operations per second in fp32, without tensor cores."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second to and from its memory."""
    link: float
    """Bytes per second to another device of the same machine."""
    network: float = 12.5e9
    """Bytes per second to a device of another machine; by default 100 Gbit/s."""
    half: float | None = None
    """In fp16 and bf16 without tensor cores; null: as in fp32."""
    tensor: float | None = None
    """In fp16 and bf16 with tensor cores; null: it has none."""
    tf32: float | None = None
    """With tensor cores; null: it has none that take fp32."""
    sustained: float | None = None
    """What large matrix products reach of `tensor`, where that is published; null: as large a share as on an A100."""
    bf16: bool = True
    """Whether it computes in bf16."""
    per_machine: int = 8
    """Devices in one machine."""

    def matrix_flops(self, precision: str, *, half: bool, tensor_cores: bool) -> tuple[float, bool]:
        """The figure for a matrix product of a run in `precision`, and whether tensor cores compute it.

        `half`: whether its numbers have 16 bits.
        """
        if half:
            without = self.half or self.flops
            return (self.tensor, True) if tensor_cores and self.tensor else (without, False)
        if precision == "tf32" and tensor_cores and self.tf32:
            return self.tf32, True
        return self.flops, False

    def refusal(self, precision: str, *, tensor_cores: bool) -> str | None:
        """Why it cannot compute in this precision."""
        if precision == "tf32" and (self.tf32 is None or not tensor_cores):
            return "needs tensor cores for tf32" if self.tf32 else "has no tf32"
        return "has no bf16" if precision == "bf16" and not self.bf16 else None


PCIE_3, PCIE_4, PCIE_5 = 12e9, 25e9, 50e9
DEVICES: Mapping[str, DeviceSpec] = {
    "p40": DeviceSpec(11.76e12, 24 * GIB, 346e9, PCIE_3, half=0.184e12, bf16=False),
    "p100": DeviceSpec(9.3e12, 16 * GIB, 732e9, PCIE_3, half=18.7e12, bf16=False),
    # Four in a machine with 50 Gbit/s, as in AWS's g4dn; its 70 W do not sustain the data sheet's figure.
    "t4": DeviceSpec(
        8.1e12,
        16 * GIB,
        320e9,
        PCIE_3,
        6.25e9,
        half=16.2e12,
        tensor=65e12,
        sustained=24e12,
        bf16=False,
        per_machine=4,
    ),
    # NVLink 2: 300 GB/s both ways together
    "v100": DeviceSpec(15.7e12, 32 * GIB, 900e9, 150e9, half=31.4e12, tensor=125e12, bf16=False),
    "rtx3090": DeviceSpec(35.6e12, 24 * GIB, 936e9, PCIE_4, tensor=71e12, tf32=35.6e12),
    # Four in a machine with 40 Gbit/s, as in AWS's g5
    "a10": DeviceSpec(31.2e12, 24 * GIB, 600e9, PCIE_4, 5e9, tensor=125e12, tf32=62.5e12, per_machine=4),
    # NVLink 3: 600 GB/s both ways together; a machine has 200 Gbit/s for each device
    "a100": DeviceSpec(19.5e12, 80 * GIB, 2039e9, 300e9, 25e9, half=78e12, tensor=312e12, tf32=156e12),
    "rtx4090": DeviceSpec(82.6e12, 24 * GIB, 1008e9, PCIE_4, tensor=165.2e12, tf32=82.6e12),
    # Four in a machine with 40 Gbit/s, as in AWS's g6
    "l4": DeviceSpec(30.3e12, 24 * GIB, 300e9, PCIE_4, 5e9, tensor=121e12, tf32=60e12, per_machine=4),
    "l40s": DeviceSpec(91.6e12, 48 * GIB, 864e9, PCIE_4, tensor=362e12, tf32=183e12),
    # NVLink 4: 900 GB/s both ways together; 400 Gbit/s for each device
    "h100": DeviceSpec(
        66.9e12,
        80 * GIB,
        3352e9,
        450e9,
        50e9,
        half=133.8e12,
        tensor=989.4e12,
        tf32=494.7e12,
        sustained=794.5e12,
    ),
    "h200": DeviceSpec(
        66.9e12,
        141 * 10**9,
        4800e9,
        450e9,
        50e9,
        half=133.8e12,
        tensor=989.4e12,
        tf32=494.7e12,
        sustained=794.5e12,
    ),
    # NVLink 5: 1.8 TB/s both ways together
    "b200": DeviceSpec(
        75e12,
        180 * 10**9,
        7700e9,
        900e9,
        50e9,
        half=150e12,
        tensor=2250e12,
        tf32=1125e12,
        sustained=1745e12,
    ),
    "rtx5090": DeviceSpec(104.8e12, 32 * GIB, 1792e9, PCIE_5, tensor=209.5e12, tf32=104.8e12),
    # Infinity Fabric: 128 GB/s both ways together to each of the seven others
    "mi300x": DeviceSpec(
        163.4e12,
        192 * 10**9,
        5300e9,
        64e9,
        50e9,
        tensor=1307.4e12,
        tf32=653.7e12,
        sustained=668.4e12,
    ),
}
DATA_SHEET, PRODUCTS = (
    "data sheet only",
    "checked against matrix products in bf16 (Bekman, Machine Learning Engineering)",
)
CHECKED = {
    "a100": "checked against published iterations of GPT on 8 of them (vTrain, MICRO 2024)",
    "t4": (
        "checked against matrix products in fp16 (NVIDIA's forum, 264462) and published steps of GPT-2 on 16 of them "
        "(AMP, NeurIPS 2022)"
    ),
    **dict.fromkeys(("h100", "h200", "b200", "mi300x"), PRODUCTS),
}
"""What the figures were checked against; `sustained` is from there."""


def checked_against(device: str | Mapping[str, Any]) -> str:
    """What is known of the figures of a device, by its name or by the figures that were given."""
    name = device if isinstance(device, str) else device.get("name")
    own = [] if isinstance(device, str) else [key for key in device if key != "name"]
    if name is None:
        return "your figures only"
    return CHECKED.get(name, DATA_SHEET) + (f"; your {', '.join(own)}" if own else "")


def is_elsewhere(device: object) -> bool:
    """Whether this entry of `devices` is a name or the figures of a device that need not be in this machine."""
    return isinstance(device, Mapping) or (isinstance(device, str) and device in DEVICES)


def device_problems(device: object, devices: Any) -> Iterator[str]:
    """What is wrong with the keys `device` and `devices` of a plan for devices that need not be in this machine."""
    if isinstance(device, str) and device not in DEVICES:
        yield f"device={device}: unknown device; {or_list(device.lower(), DEVICES)}"
    elif device is not None and not isinstance(device, str | Mapping):
        yield f"device={device}: must be a name such as a100, or figures such as {{flops:50e12,memory:24GiB,...}}"
    if device is None and (others := [other for other in devices if not is_elsewhere(other)]):
        yield (
            f"devices={devices}: devices of this machine and others cannot be mixed, and {others[0]} is none of "
            f"{', '.join(sorted(DEVICES))}"
        )
    if device is not None and (not isinstance(devices, int) or isinstance(devices, bool)):
        yield f"devices={devices}: give the number of devices for device={device}, such as devices=8"


def own_device(figures: Mapping[str, Any], key: str = "device") -> DeviceSpec:
    """A device of which you give the figures, such as `{flops: 50e12, memory: 24GiB, bandwidth: 1e12, link: 25e9}`.

    `flops` then holds for every precision that has no figure of its own. With a `name`,
    such as `{name: t4, link: 6e9}`, all other figures are those of the table. `key` is where the figures were given.
    """
    names = [field.name for field in fields(DeviceSpec)]
    for name in figures:
        if name not in ("name", *names):
            hint = did_you_mean(name, names) or f"it has {', '.join(names)}"
            raise ConfigError(f"{key}.{name}: unknown figure of a device; {hint}")
    given = {name: _figure(key, name, value) for name, value in figures.items() if name != "name"}
    if "name" in figures:
        known = DEVICES.get(str(figures["name"]))
        if known is None:
            hint = or_list(str(figures["name"]).lower(), DEVICES)
            raise ConfigError(f"{key}.name={figures['name']}: unknown device; {hint}")
        # What was sustained says nothing of another figure for tensor cores.
        return replace(known, **{"sustained": None if "tensor" in given else known.sustained, **given})
    for name in NEEDED:
        if name not in figures:
            raise ConfigError(f"{key}: a custom device needs {name}, or the name of one whose figures it has")
    half = given.get("half") or given["flops"]
    return DeviceSpec(**{"tensor": half, "tf32": given["flops"], **given})


def _figure(key: str, name: str, value: Any) -> Any:
    if name == "memory":
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ConfigError(f"{key}.memory={value}: {error}") from error
    if name == "bf16":
        if not isinstance(value, bool):
            raise ConfigError(f"{key}.bf16={value}: must be true or false")
        return value
    if value is None and name in OPTIONAL:
        return None
    number = _positive(value)
    if number is None or (name == "per_machine" and number != int(number)):
        what = "whole number" if name == "per_machine" else "number"
        raise ConfigError(f"{key}.{name}={value}: must be a positive {what}")
    return int(number) if name == "per_machine" else number


def _positive(value: Any) -> float | None:
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return number if number is not None and 0 < number < inf else None
