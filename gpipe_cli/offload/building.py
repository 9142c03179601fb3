"""Build a model that never is in memory as a whole: its own constructor runs, and large tensors go to a tier.

    built = build_on_tier(tier, build)
    Slice(tier, parameters, built.value_of)

So the parameters are those of a plain model to the bit: same code, same order, same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

from torch import Tensor, nn

from gpipe_cli.offload.stored_tensors import StoredTensors
from gpipe_cli.offload.tiers import Tier
from gpipe_cli.sequential.unloaded import UnloadedParameter
from gpipe_cli.torch_internals.spilled_tensors import spilling

MAX_BYTES_IN_MEMORY = 2**28
"""Of large tensors while a constructor runs: a layer may compute with several at a time."""

Model = TypeVar("Model", bound=nn.Module)


@final
class BuiltModel(Generic[Model]):
    """A model whose large parameters are placeholders; buffers and small parameters have their values."""

    def __init__(self, tier: Tier, model: Model, stored: list[StoredTensors]) -> None:
        self.model = model
        self._tier, self._stored = tier, stored

    def value_of(self, tensor: Tensor) -> Tensor:
        """Read the value of one parameter into memory."""
        values = (stored.get(tensor) for stored in self._stored)
        return next((value for value in values if value is not None), tensor)

    def close(self) -> None:
        self._tier.close()


def build_on_tier(tier: Tier, build: Callable[[], Model]) -> BuiltModel[Model]:
    with spilling(tier.region, MAX_BYTES_IN_MEMORY) as spilled:
        model = build()
    # Buffers stay in memory: layers may read and write them at any time.
    for buffer in model.buffers():
        spilled.give_back(buffer)
    all_stored = []
    for parameter in model.parameters():
        if isinstance(parameter, UnloadedParameter):
            continue  # it is in a file already
        value = spilled.give_back(parameter.data)
        stored = StoredTensors(tier, [value])
        stored.put(0, value)
        parameter.data = stored.homes[0]
        all_stored.append(stored)
    return BuiltModel(tier, model, all_stored)
