"""Which layers of a model do the same, so that a few of them stand for all: by structure, not by values.

key = layer_key(layer, value)              # equal for layers that do the same with inputs of the same shapes
sample = LayerSample.of(kinds, borders)    # the layers to measure
sample.for_all(times)                      # what was measured of them, for every layer
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.pytree import flatten, plain_values
from gpipe_cli.sequential.sequence import LayerSequence, layer_names

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_NUMBERED = frozenset({"layer_idx"})
"""A layer of Hugging Face's knows its number, which only says where a cache of generated tokens belongs."""


MAX_EQUAL_LAYERS = 64
"""How many equal layers are measured: together they are larger than a cache, unless their parameters matter little."""


def layer_key(layer: nn.Module, value: Any) -> Hashable:
    """A key that is equal for two layers that do the same with values of the same shapes."""
    tensors, template = flatten(value, "input")
    plain = tuple(map(type, plain_values(template)))  # 1 equals True
    return structure(layer), template, plain, *map(signature, tensors)


@final
@dataclass(frozen=True)
class LayerSample:
    """Some layers of a model that run as a model of their own, with at most a few of each kind."""

    kinds: Sequence[Hashable]
    """The kind of every layer of the model; equal layers have the same."""
    places: Sequence[int]
    """The layers in the sample; those that come before a layer end with what it takes."""

    @staticmethod
    def of(kinds: Sequence[Hashable], crossed: Collection[int], most: int = MAX_EQUAL_LAYERS) -> LayerSample:
        """`crossed` are the layers that a skip passes or reaches, which depend on more than their input."""
        by_kind: dict[Hashable, list[int]] = defaultdict(list)
        for place, kind in enumerate(kinds):
            if place not in crossed:
                by_kind[kind].append(place)
        firsts = sorted({kind: place for place, kind in reversed(list(enumerate(kinds)))}.values())
        places: list[int] = []
        taken: Counter[Hashable] = Counter()
        place = 0
        while place < len(kinds):
            kind = kinds[place]
            if taken[kind] >= most and place not in crossed:
                # Continue at the last equal layer, but skip none of which there is no equal so far.
                following = bisect_right(firsts, place)
                end = firsts[following] if following < len(firsts) else len(kinds)
                equal = by_kind[kind]
                place = equal[bisect_right(equal, end - 1) - 1]
            places.append(place)
            taken[kind] += 1
            place += 1
        return LayerSample(kinds, places)

    @property
    def is_whole(self) -> bool:
        return len(self.places) == len(self.kinds)

    def layers(self, module: nn.Sequential) -> nn.Sequential:
        if self.is_whole:
            return module
        names = layer_names(module)
        return LayerSequence(
            [module[place] for place in self.places],
            names=[names[place] for place in self.places],
            output_templates=module.output_templates if isinstance(module, LayerSequence) else {},
        )

    def for_all(self, numbers: Sequence[float]) -> list[float]:
        """What was measured of the layers in the sample, for every layer: equal ones have the mean of their numbers."""
        measured: dict[Hashable, list[float]] = defaultdict(list)
        for place, number in zip(self.places, numbers, strict=True):
            measured[self.kinds[place]].append(number)
        means = {kind: fmean(group) for kind, group in measured.items()}
        return [means[kind] for kind in self.kinds]


def structure(layer: nn.Module) -> Hashable:
    """A key that is equal for two layers that do the same with inputs of the same shapes."""
    return tuple((path, type(module), _attributes(module)) for path, module in layer.named_modules())


def signature(tensor: Tensor) -> Hashable:
    """What the work of a layer depends on, of a tensor it receives or owns."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _attributes(module: nn.Module) -> Hashable:
    own = vars(module)
    plain = [(name, _plain(own[name])) for name in own if name not in _OF_EVERY_MODULE | _NUMBERED]
    tensors = [
        (name, None if tensor is None else signature(tensor))
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
    ]
    hooks = [
        (name, _plain(hook)) for name in own if "hook" in name and own[name] for hook in own[name].values()
    ]
    return (*plain, *tensors, *hooks)


def _plain(value: Any) -> Hashable:
    """Values that cannot change are equal if they look the same; of all others only the very same object is."""
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_plain, value))
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)
