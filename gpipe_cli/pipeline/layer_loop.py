"""The loop over the layers of one partition, for one micro-batch: the only place where a pipe calls layers.

While a layer runs, its random operators draw from its key, its skips go to the partition's tracker, and it uses its own
copies of tied parameters.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import NamedTuple, final

from torch import Tensor

from gpipe_cli.pipeline.boundary import GraphLeakDetector, PartitionInput
from gpipe_cli.pipeline.context import Running
from gpipe_cli.pipeline.failures import layer_that_failed
from gpipe_cli.pipeline.forward_task import ForwardTask, SavedForBackward
from gpipe_cli.pipeline.layer import Layer, layer_seed, node_seed, warn_of_unkeyed
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.pipeline.tied import NOTHING_TIED
from gpipe_cli.pytree import Template, flatten
from gpipe_cli.skip.layout import SkipRoute
from gpipe_cli.skip.namespace import SkipName
from gpipe_cli.skip.skippable import named_skippables
from gpipe_cli.skip.tracker import use_skip_tracker
from gpipe_cli.torch_internals.autograd_graph import next_number
from gpipe_cli.torch_internals.keyed_random import BACKWARD, KeyedRandom
from gpipe_cli.torch_internals.tensor_memory import storage_of, version_of

_NO_SKIPS = contextlib.nullcontext()
INPUT, LOSS = "its input", "the loss function"
BackwardWatch = Callable[[SavedForBackward, str], AbstractContextManager[object]]
"""Makes the context in which a backward, or the half of one that is named, runs."""


class LayerOutputs(NamedTuple):
    values: tuple[Tensor, ...]
    template: Template
    skips: tuple[Tensor | None, ...]
    """Those that other partitions pop."""
    node_numbers: tuple[int, ...]


@final
class LayerLoop:
    def __init__(
        self, layers: Sequence[Layer], receives: Sequence[SkipRoute], sends: Sequence[SkipRoute]
    ) -> None:
        self._layers = layers
        self._receives = receives
        self._sends = sends
        self._has_skips = any(True for layer in layers for _ in named_skippables(layer.module))
        self._all_watched = False
        self._key, self._micro_batch = 0, 0
        """Of the running task. Not the task itself: it would keep the tensors of the mini-batch alive."""
        self._node_numbers: tuple[int, ...] = ()
        """Of the graph whose backward is running."""
        self._random = KeyedRandom(self._seed_of, self._warn_of)
        self._random.source = INPUT
        self.backward_watch: BackwardWatch | None = None

    def begin(self) -> None:
        """Look once per mini-batch whether every layer was already watched for unkeyed randomness."""
        self._all_watched = all(layer.is_watched for layer in self._layers)

    def run(
        self,
        inputs: tuple[PartitionInput, ...],
        entered: Sequence[Sequence[Tensor | None]],
        task: ForwardTask,
        *,
        checkpointing: bool = False,
        recomputing: bool = False,
        leak_detector: GraphLeakDetector | None = None,
    ) -> LayerOutputs:
        """Call the layers in turn, and the loss after the last one."""
        value, skips = self._unpack(inputs, entered)
        random = self._random
        self._key, self._micro_batch = task.batch.key, task.micro_batch.index
        # The numbers of autograd's nodes tell later which layer created which node.
        numbers = [next_number()]
        with (
            Running(task.micro_batch, checkpointing, recomputing, self._running_layer),
            _NO_SKIPS if skips is None else use_skip_tracker(skips),
            random,
        ):
            nothing_tied = task.untied.count(NOTHING_TIED) == len(self._layers)
            if self._all_watched and nothing_tied and leak_detector is None:
                # The common case. For small layers, every line here counts.
                for layer in self._layers:
                    random.source = layer
                    value = layer.module(value)
                    numbers.append(next_number())
            else:
                for layer, untied in zip(self._layers, task.untied, strict=True):
                    random.source = layer
                    with untied:
                        value = layer.module(value) if layer.is_watched else layer.watch(value)
                    numbers.append(next_number())
                    if leak_detector is not None:
                        leak_detector.check(layer, value)
            if task.loss is not None:
                random.source = LOSS
                value = task.loss(value, task.micro_batch)
                numbers.append(next_number())
            values, template = flatten(value, "output")
            if not values:
                raise TypeError(f"expected Tensor, but got {type(value).__name__} as output")
            # Not the last layer any more: an error from here on is none of its own.
            random.source = INPUT
        return LayerOutputs(values, template, () if skips is None else skips.sent(), tuple(numbers))

    def _unpack(
        self, inputs: tuple[PartitionInput, ...], entered: Sequence[Sequence[Tensor | None]]
    ) -> tuple[Value, PartitionSkips | None]:
        """The value for the first layer, and the tracker with the received skips; None without skippable layers."""
        value, received = inputs[0].unpack(entered[0])
        if not self._has_skips:
            return value, None
        if self._receives:
            others = (
                input.unpack(tensors)[1] for input, tensors in zip(inputs[1:], entered[1:], strict=True)
            )
            received = [*received, *chain.from_iterable(others)]
        return value, PartitionSkips(self._receives, received, self._sends, inputs[0].linked_skips())

    def keyed_backward(
        self, saved: SavedForBackward, phase: str = "backward"
    ) -> AbstractContextManager[object]:
        """Context manager: what autograd nodes draw in backward is keyed by the layer that created them."""
        self._key, self._micro_batch = saved.task.batch.key, saved.task.micro_batch.index
        self._node_numbers = saved.node_numbers
        self._random.source = BACKWARD
        return (
            self._random if self.backward_watch is None else self._watched(self.backward_watch(saved, phase))
        )

    @contextmanager
    def _watched(self, watch: AbstractContextManager[object]) -> Iterator[None]:
        with watch, self._random:
            yield

    def locate(self, phase: str, saved: SavedForBackward | None, error: BaseException) -> str:
        """Name the layer that raised `error`."""
        if phase == "backward" and saved is not None:
            return layer_that_failed(self._layers, saved.roots, saved.node_numbers, error)
        return self._running_layer()

    def _running_layer(self) -> str:
        source = self._random.source
        if isinstance(source, Layer):
            return f"layer {source!r}"
        return source if isinstance(source, str) else INPUT

    def _seed_of(self, source: Layer | str | int) -> int:
        """The seed for what `source` draws: a layer or the loss, in backward the number of an autograd node."""
        drawing = self._layer_of_node(source) if isinstance(source, int) else source
        loss_position = self._layers[-1].position + 1 if self._layers else 0
        position = drawing.position if isinstance(drawing, Layer) else loss_position
        if not isinstance(source, int):
            return layer_seed(self._key, position, self._micro_batch)
        first = self._node_numbers[position - self._layers[0].position if self._layers else 0]
        return node_seed(self._key, position, self._micro_batch, source - first)

    def _layer_of_node(self, number: int) -> Layer | str:
        place = bisect.bisect_right(self._node_numbers, number) - 1
        return self._layers[place] if 0 <= place < len(self._layers) else LOSS

    def _warn_of(self, source: Layer | str | int, what: str) -> None:
        drawing = self._layer_of_node(source) if isinstance(source, int) else source
        if isinstance(drawing, Layer):
            drawing.warn_of(what)
        else:
            warn_of_unkeyed(drawing, what)


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
        """linked: places of received skips that autograd knows as views, so a write through another tensor is right."""
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
            refuse_written_skips([name], [value], [self._versions[name]])
        return value

    def sent(self) -> tuple[Tensor | None, ...]:
        """What leaves the partition, in the order of its routes."""
        return tuple(self._sent.values())


def refuse_written_skips(
    names: Sequence[SkipName],
    values: Sequence[Tensor | None],
    versions: Sequence[int],
    written_copies: Collection[int] = (),
) -> None:
    """Raise if a layer wrote a skip after its stash: the graph of the skip itself does not know of the write.

    written_copies: storages of which a partition wrote a copy of its own.
    """
    for name, value, version in zip(names, values, versions, strict=False):
        if skip_version(value) != version or (value is not None and storage_of(value) in written_copies):
            raise RuntimeError(
                f"skip '{name.name}' was written in place between stash and pop, so its gradient would be "
                "wrong. Stash a clone, or stop the layer that writes (perhaps a ReLU with inplace=True)"
            )


def skip_version(value: Tensor | None) -> int:
    return 0 if value is None else version_of(value)
