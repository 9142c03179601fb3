"""One layer of the sequence, the keys of its randomness, and the detection of random numbers that no key governs.

A layer's seed is a hash of (step key, position of the layer, micro-batch), so recompute, and every other balance,
schedule or engine, draws the same numbers. Random operators of torch draw from it (`torch_internals.keyed_random`).
gpipe cannot key numbers from NumPy, from Python's `random` or from a generator of the layer's own; it warns once per
layer instead.
"""

from __future__ import annotations

import hashlib
import struct
import types
import warnings
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import nn

from gpipe_cli.sequential import layer_class, layer_names
from gpipe_cli.torch_internals.keyed_random import generator_states

_WORD = (1 << 64) - 1


@final
class UnkeyedRandomWarning(UserWarning):
    """A layer draws random numbers that its key does not determine."""


@final
class Layer:
    """A child of the sequence, with its name and its position, which is part of its key."""

    __slots__ = ("_warned", "_watched", "module", "name", "position")

    def __init__(self, module: nn.Module, name: str, position: int) -> None:
        self.module = module
        self.name = name
        self.position = position
        self._watched: set[bool] = set()
        self._warned = False

    @property
    def is_watched(self) -> bool:
        """Whether `watch` has already run the layer in its current training mode."""
        return self.module.training in self._watched

    def watch(self, value: Any) -> Any:
        """Call the layer and check whether it draws random numbers outside torch."""
        self._watched.add(self.module.training)
        before = generator_states()
        output = self.module(value)
        for owner, state in generator_states().items():
            # Other threads draw from the same generators: a changed state counts only if the layer's code uses them.
            if before.get(owner) != state and _mentions(self.module, owner):
                self.warn_of(owner)
        return output

    def warn_of(self, source: str) -> None:
        """Warn, the first time, that the layer draws without its key."""
        if not self._warned:
            self._warned = True
            warn_of_unkeyed(f"layer {self!r}", source)

    def __repr__(self) -> str:
        return f"'{self.name}' ({layer_class(self.module)})"


def warn_of_unkeyed(subject: str, source: str) -> None:
    warnings.warn(
        f"{subject} draws random numbers with {source}, which gpipe cannot key: they depend on thread timing, and "
        "recompute draws others. Draw with torch and its default generator instead",
        UnkeyedRandomWarning,
        stacklevel=2,
    )


def layers_of(module: nn.Sequential) -> tuple[Layer, ...]:
    """The children of a sequence."""
    return tuple(
        Layer(child, name, position)
        for position, (child, name) in enumerate(zip(module, layer_names(module), strict=True))
    )


def _mentions(module: nn.Module, owner: str) -> bool:
    """Whether the code of a layer, or of a function it calls by name, refers to the module `owner`."""
    pending = [
        member
        for part in module.modules()
        for holder in (part, *type(part).__mro__[:-1])
        for member in vars(holder).values()
        if isinstance(member, types.FunctionType)
    ]
    visited: set[types.FunctionType] = set()
    while pending:
        function = pending.pop()
        if function in visited or (function.__module__ or "").startswith("torch."):
            continue
        visited.add(function)
        names = set(_names(function.__code__))
        targets = [function.__globals__.get(name) for name in names]
        if any(_belongs(target, owner) for target in targets) or names.issuperset(owner.split(".")):
            return True
        if "random" in names and any(getattr(target, "__name__", "") == "numpy" for target in targets):
            return owner == "numpy.random"
        pending += [target for target in targets if isinstance(target, types.FunctionType)]
    return False


def _belongs(target: object, owner: str) -> bool:
    """Whether `target` is the module itself, or a function that draws from its state."""
    kind = type(getattr(target, "__self__", None)).__module__
    return (isinstance(target, types.ModuleType) and target.__name__ == owner) or kind.startswith(owner)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def draw_key() -> int:
    """A step key from torch's default generator, so that `torch.manual_seed` determines it."""
    return int(torch.randint(1 << 62, (), device="cpu"))


def layer_seed(key: int, layer: int, micro_batch: int) -> int:
    """The seed of one layer's draws for one micro-batch. It does not depend on balance, schedule or engine."""
    words = struct.pack("<QQQ", key & _WORD, layer, micro_batch)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def node_seed(key: int, layer: int, micro_batch: int, node: int) -> int:
    """The seed of what one autograd node of a layer draws in backward. It does not depend on the schedule."""
    # No mini-batch has so many micro-batches, so no node shares a seed with a layer.
    return layer_seed(layer_seed(key, layer, _WORD - micro_batch), node, 0)


def replica_key(key: int, replica: int) -> int:
    """The step key of one replica. Replicas draw different numbers; the first draws those of a single process."""
    # No model has so many layers, so no replica's key is the seed of a layer.
    return key if replica == 0 else layer_seed(key, _WORD, replica)
