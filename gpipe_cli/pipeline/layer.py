"""One layer, run under its key.

Decides when a layer runs under the keyed dispatch mode: the first time in each mode (train, eval), to learn
whether it draws, and ever after if it does. A layer that draws nothing pays nothing. Knows nothing of
partitions.
"""

from __future__ import annotations

from typing import Any, final

from torch import nn

from gpipe_cli.pipeline.keys import layer_seed
from gpipe_cli.sequential import layer_names
from gpipe_cli.torch_internals.keyed_random import KeyedRandom

__all__ = ["Layer", "layers_of"]


@final
class Layer:
    """A child of the sequence: its name there and its position, which is part of its key."""

    __slots__ = ("_draws", "module", "name", "position")

    def __init__(self, module: nn.Module, name: str, position: int) -> None:
        self.module = module
        self.name = name
        self.position = position
        self._draws: dict[bool, bool] = {}

    def run(self, value: Any, key: int, micro_batch: int, random: KeyedRandom) -> Any:
        training = self.module.training
        draws = self._draws.get(training)
        if draws is False:
            return self.module(value)
        with random.reseed(layer_seed(key, self.position, micro_batch)):
            output = self.module(value)
        if draws is None:
            random.refuse_in_checkpoint()
            self._draws[training] = random.drew
        return output

    @property
    def draws_nothing(self) -> bool:
        """Whether it was seen to, in the mode it is in."""
        return self._draws.get(self.module.training) is False

    def always_keyed(self) -> None:
        """Some layer drew that had not drawn at first: trust none of them any more."""
        self._draws = {True: True, False: True}

    def __repr__(self) -> str:
        return f"'{self.name}' ({type(self.module).__name__})"


def layers_of(module: nn.Sequential) -> tuple[Layer, ...]:
    """The children of a sequence."""
    return tuple(
        Layer(child, name, position)
        for position, (child, name) in enumerate(zip(module, layer_names(module), strict=True))
    )
