"""Which worker runs which partition: round robin, so partition `p` is on worker `p % devices`.

Knows nothing of the order in which a worker runs them.
"""

from __future__ import annotations


def partitions_of(worker: int, partitions: int, devices: int) -> range:
    """The partitions a worker runs, ascending."""
    return range(worker, partitions, devices)


def require_one_each(name: str, partitions: int, devices: int) -> None:
    """Refuse to place several partitions, or none, on one device."""
    if partitions != devices:
        cure = "; 'interleaved' takes more partitions than devices" if partitions > devices else ""
        raise ValueError(
            f"schedule {name!r} runs one partition per device, got {partitions} for {devices} devices{cure}"
        )
