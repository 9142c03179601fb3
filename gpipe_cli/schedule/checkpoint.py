"""Which micro-batches are checkpointed: one mode for all partitions, or one for each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

MODES = ("always", "except_last", "never")

Checkpoint: TypeAlias = str | tuple[str, ...]
"""A mode for all partitions, or a tuple with one for each."""


def checked_checkpoint(given: str | Iterable[str], partitions: int) -> Checkpoint:
    """Check what the user gave; modes that are all the same become a single one."""
    is_single = isinstance(given, str) or not isinstance(given, Iterable)
    modes = (str(given),) if is_single else tuple(map(str, given))
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never' ({mode!r})")
    if not is_single and len(modes) != partitions:
        raise ValueError(
            f"checkpoint has {len(modes)} modes for {partitions} partitions; give one for each, or one for all"
        )
    return modes[0] if len(set(modes)) == 1 else modes


def checkpoint_stops(checkpoint: Checkpoint, partitions: int, micro_batches: int) -> tuple[int, ...]:
    """For each partition the first micro-batch that is not checkpointed; `except_last` is the last that exists."""
    stops = {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}
    modes = (checkpoint,) * partitions if isinstance(checkpoint, str) else checkpoint
    return tuple(stops[mode] for mode in modes)
