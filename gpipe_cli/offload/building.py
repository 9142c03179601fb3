"""Store a model that never is in memory as a whole on a tier, tensor by tensor.

    values = DeferredValues()
    with values.recording():
        model = build()
    stored = store_on_tier(tier, model, values)
    Slice(tier, parameters, stored.value_of)

Its own constructor runs, so the parameters are those of a plain model to the bit.
"""

from __future__ import annotations

from typing import Generic, TypeVar, final

from torch import Tensor, nn

from gpipe_cli.offload.stored_tensors import StoredTensors
from gpipe_cli.offload.tiers import Tier
from gpipe_cli.sequential.deferred import DeferredParameter
from gpipe_cli.torch_internals.deferred_values import DeferredValues, replace_value

Model = TypeVar("Model", bound=nn.Module)


@final
class StoredModel(Generic[Model]):
    """A model whose parameters are placeholders; buffers have their values."""

    def __init__(self, tier: Tier, model: Model, stored: list[StoredTensors]) -> None:
        self.model = model
        self._tier, self._stored = tier, stored

    def value_of(self, tensor: Tensor) -> Tensor:
        """Read the value of one parameter into memory."""
        values = (stored.get(tensor) for stored in self._stored)
        return next((value for value in values if value is not None), tensor)

    def close(self) -> None:
        self._tier.close()


def store_on_tier(tier: Tier, model: Model, values: DeferredValues) -> StoredModel[Model]:
    # Buffers stay in memory: layers may read and write them at any time.
    values.fill(model.buffers())
    all_stored = []
    for parameter in model.parameters():
        if isinstance(parameter, DeferredParameter):
            continue  # it is in a file already
        value = values.value_of(parameter.data)
        stored = StoredTensors(tier, [value])
        stored.put(0, value)
        replace_value(parameter, stored.homes[0])
        all_stored.append(stored)
    return StoredModel(tier, model, all_stored)
