"""The layers of one partition, run for one micro-batch, each under its key.

Decides what surrounds a layer when it runs: its key, the skips it may reach, aliases of tied parameters, and what is
known of it when it raises. Knows nothing of what a partition keeps.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import final

from torch import Tensor

from gpipe_cli.pipeline.boundary import Parcel
from gpipe_cli.pipeline.context import Running
from gpipe_cli.pipeline.culprit import failed_in_backward
from gpipe_cli.pipeline.entangled import Watch
from gpipe_cli.pipeline.keys import layer_seed, node_seed
from gpipe_cli.pipeline.layer import Layer, warn_of_unkeyed
from gpipe_cli.pipeline.pytree import flatten
from gpipe_cli.pipeline.skips import PartitionSkips
from gpipe_cli.pipeline.tied import NO_ALIASES
from gpipe_cli.pipeline.visit import Kept, Ran, Visit
from gpipe_cli.skip.layout import SkipRoute
from gpipe_cli.skip.tracker import use_skip_tracker
from gpipe_cli.torch_internals.graph_progress import next_number
from gpipe_cli.torch_internals.keyed_random import BACKWARD, KeyedRandom

__all__ = ["LayerRun"]

INPUT, LOSS = "its input", "the loss function"


@final
class LayerRun:
    def __init__(
        self, layers: Sequence[Layer], receives: Sequence[SkipRoute], sends: Sequence[SkipRoute]
    ) -> None:
        self._layers = layers
        self._receives = receives
        self._sends = sends
        self._all_watched = False
        self._marks: tuple[int, ...] = ()
        """Of the graph that a backward runs."""
        self._random = KeyedRandom(self._warn_of)
        self._random.source = INPUT

    def begin(self) -> None:
        """Look once per mini-batch whether all layers were already watched."""
        self._all_watched = all(layer.is_watched for layer in self._layers)

    def __call__(
        self,
        parcels: tuple[Parcel, ...],
        entered: Sequence[Sequence[Tensor | None]],
        visit: Visit,
        *,
        checkpointing: bool = False,
        recomputing: bool = False,
        watch: Watch | None = None,
    ) -> Ran:
        """The layers in turn, and the loss after the last one."""
        value, received = parcels[0].unpack(entered[0])
        if self._receives:
            skips_of_others = (
                parcel.unpack(tensors)[1] for parcel, tensors in zip(parcels[1:], entered[1:], strict=True)
            )
            received = [*received, *chain.from_iterable(skips_of_others)]
        skips = PartitionSkips(self._receives, received, self._sends, linked=parcels[0].linked_skips())
        micro_batch, random = visit.micro_batch, self._random
        marks = [next_number()]
        with (
            Running(
                micro_batch, checkpointing=checkpointing, recomputing=recomputing, where=self._running_layer
            ),
            use_skip_tracker(skips),
            random.seeded_by(partial(self._seed_of_layer, visit)),
        ):
            if self._all_watched and watch is None and visit.aliases.count(NO_ALIASES) == len(self._layers):
                # Nothing but the layers themselves: for small ones every line here counts.
                for layer in self._layers:
                    random.source = layer
                    value = layer.module(value)
                    marks.append(next_number())
            else:
                for layer, aliases in zip(self._layers, visit.aliases, strict=True):
                    random.source = layer
                    with aliases:
                        value = layer.module(value) if layer.is_watched else layer.watch(value)
                    marks.append(next_number())
                    if watch is not None:
                        watch.look(layer, value)
            if visit.head is not None:
                random.source = LOSS
                value = visit.head(value, micro_batch)
                marks.append(next_number())
            values, template = flatten(value, "output")
            if not values:
                raise TypeError(f"expected Tensor, but got {type(value).__name__} as output")
            random.source = INPUT
        return Ran(values, template, skips.sent(), tuple(marks))

    def in_backward(self, kept: Kept) -> KeyedRandom:
        """Context manager: what nodes draw in backward is keyed by the layer that made them."""
        self._random.source = BACKWARD
        self._marks = kept.marks
        return self._random.seeded_by(partial(self._seed_of_node, kept))

    def whereabouts(self, phase: str, kept: Kept | None, error: BaseException) -> str:
        """Where `error` was raised, in words."""
        if phase == "backward" and kept is not None:
            return failed_in_backward(self._layers, kept.roots, kept.marks, error)
        return self._running_layer()

    def _running_layer(self) -> str:
        source = self._random.source
        if isinstance(source, Layer):
            return f"layer {source!r}"
        return source if isinstance(source, str) else INPUT

    def _seed_of_layer(self, visit: Visit, source: Layer | str) -> int:
        position = source.position if isinstance(source, Layer) else self._after_last
        return layer_seed(visit.batch.key, position, visit.micro_batch.index)

    def _seed_of_node(self, kept: Kept, number: int) -> int:
        source = self._layer_of_node(number)
        position = source.position if isinstance(source, Layer) else self._after_last
        first = kept.marks[position - self._layers[0].position] if self._layers else kept.marks[0]
        return node_seed(kept.visit.batch.key, position, kept.visit.micro_batch.index, number - first)

    def _layer_of_node(self, number: int) -> Layer | str:
        place = bisect.bisect_right(self._marks, number) - 1
        return self._layers[place] if 0 <= place < len(self._layers) else LOSS

    @property
    def _after_last(self) -> int:
        """The position of the loss."""
        return self._layers[-1].position + 1 if self._layers else 0

    def _warn_of(self, source: Layer | str | int, what: str) -> None:
        if isinstance(source, int):
            source = self._layer_of_node(source)
        if isinstance(source, Layer):
            source.warn_of(what)
        else:
            warn_of_unkeyed(source, what)
