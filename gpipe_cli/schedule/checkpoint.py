"""Which micro-batches are checkpointed: one mode for all partitions, or one for each of them.

Knows nothing of what checkpointing does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["MODES", "Checkpoint", "checkpoint_stops", "each", "settled"]

MODES = ("always", "except_last", "never")

Checkpoint: TypeAlias = str | tuple[str, ...]
"""Modes by partition, where they are not all the same."""


def settled(given: str | Iterable[str], partitions: int) -> Checkpoint:
    """What was given, checked: modes that are all the same become one."""
    one_for_all = isinstance(given, str) or not isinstance(given, Iterable)
    modes = (str(given),) if one_for_all else tuple(map(str, given))
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never' ({mode!r})")
    if not one_for_all and len(modes) != partitions:
        raise ValueError(
            f"checkpoint has {len(modes)} modes for {partitions} partitions; give one for each, or one for all"
        )
    return modes[0] if len(set(modes)) == 1 else modes


def each(checkpoint: Checkpoint, partitions: int) -> tuple[str, ...]:
    """A mode for every partition."""
    return (checkpoint,) * partitions if isinstance(checkpoint, str) else checkpoint


def checkpoint_stops(checkpoint: Checkpoint, partitions: int, micro_batches: int) -> tuple[int, ...]:
    """For each partition the first micro-batch that is not checkpointed.

    `except_last` means the last one that exists.
    """
    stops = {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}
    return tuple(stops[mode] for mode in each(checkpoint, partitions))
