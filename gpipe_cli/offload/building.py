"""Models built without being whole in memory: their constructor runs as it is, and what it makes goes to a tier.

    with built_on(tier, build) as built:
        Slice(tier, parameters, built.value_of)

So the parameters are those of a plain model to the bit: same code, same order, same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

from torch import Tensor, nn

from gpipe_cli.offload.shelf import Shelf
from gpipe_cli.offload.tiers import Tier
from gpipe_cli.torch_internals.spilled_tensors import spilling

__all__ = ["Built", "built_on"]

IN_MEMORY = 2**28
"""Bytes of large tensors while a constructor runs: a layer may compute with several at a time."""

Model = TypeVar("Model", bound=nn.Module)


@final
class Built(Generic[Model]):
    """A model whose large parameters are hollow; buffers and small parameters have their numbers."""

    def __init__(self, tier: Tier, model: Model, shelves: list[Shelf]) -> None:
        self.model = model
        self._tier, self._shelves = tier, shelves

    def value_of(self, tensor: Tensor) -> Tensor:
        """The numbers of one parameter, in memory of its own."""
        found = (shelf.get(tensor) for shelf in self._shelves)
        return next((value for value in found if value is not None), tensor)

    def close(self) -> None:
        self._tier.close()


def built_on(tier: Tier, build: Callable[[], Model]) -> Built[Model]:
    with spilling(tier.region, IN_MEMORY) as spilled:
        model = build()
    for buffer in model.buffers():
        spilled.give_back(buffer)
    shelves = []
    for parameter in model.parameters():
        value = spilled.give_back(parameter.data)
        shelf = Shelf(tier, [value])
        shelf.put(0, value)
        parameter.data = shelf.homes[0]
        shelves.append(shelf)
    return Built(tier, model, shelves)
