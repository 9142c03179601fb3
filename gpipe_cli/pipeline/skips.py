"""The skips of one partition and one micro-batch: some arrive, some leave, some stay.

Decides what a layer's stash and pop mean inside a partition. Knows nothing of how skips travel between
partitions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from torch import Tensor

from gpipe_cli.skip.layout import SkipRoute
from gpipe_cli.skip.namespace import SkipName
from gpipe_cli.torch_internals.storage import storage_of
from gpipe_cli.torch_internals.tensor_version import version_of

__all__ = ["PartitionSkips", "refuse_written", "skip_version"]


@final
class PartitionSkips:
    """A SkipTracker: what layers stash and pop while one partition runs one micro-batch."""

    __slots__ = ("_sent", "_values", "_versions")

    def __init__(
        self,
        receives: Sequence[SkipRoute],
        received: Sequence[Tensor | None],
        sends: Sequence[SkipRoute],
        linked: Collection[int] = (),
    ) -> None:
        """`linked`: the places of received skips for which a write through another tensor is right."""
        self._values = {route.name: value for route, value in zip(receives, received, strict=True)}
        self._versions = {
            name: skip_version(value)
            for place, (name, value) in enumerate(self._values.items())
            if place not in linked
        }
        self._sent: dict[SkipName, Tensor | None] = {route.name: None for route in sends}

    def save(self, name: SkipName, value: Tensor | None) -> None:
        target = self._sent if name in self._sent else self._values
        target[name] = value

    def load(self, name: SkipName) -> Tensor | None:
        value = self._values.pop(name)
        if name in self._versions:
            refuse_written([name], [value], [self._versions[name]])
        return value

    def sent(self) -> tuple[Tensor | None, ...]:
        """What leaves the partition, in the order of its routes."""
        return tuple(self._sent.values())


def refuse_written(
    names: Sequence[SkipName],
    values: Sequence[Tensor | None],
    versions: Sequence[int],
    written: Collection[int] = (),
) -> None:
    """Raise if a skip is not as it was stashed: who wrote it knows of the change, its own graph does not.

    `written`: the memory that was written where nobody else sees it.
    """
    for name, value, version in zip(names, values, versions, strict=False):
        if skip_version(value) != version or (value is not None and storage_of(value) in written):
            raise RuntimeError(
                f"skip '{name.name}' was written in place between stash and pop, so its gradient would be "
                "wrong. Stash a clone, or stop the layer that writes (perhaps a ReLU with inplace=True)"
            )


def skip_version(value: Tensor | None) -> int:
    return 0 if value is None else version_of(value)
