"""The loop over the layers of one partition, for one micro-batch.

While a layer runs, its random operators draw from its key, its skips go to the partition's tracker, and it uses its own
copies of tied parameters.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import NamedTuple, final

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from gpipe_cli.pipeline.batch_state import ForwardTask, SavedForBackward
from gpipe_cli.pipeline.boundary import GraphLeakDetector, PartitionInput, shared_memory_written
from gpipe_cli.pipeline.context import Running
from gpipe_cli.pipeline.failures import layer_that_failed
from gpipe_cli.pipeline.layer import Layer, layer_seed, node_seed, warn_of_unkeyed
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.pipeline.tied import NOTHING_TIED
from gpipe_cli.pytree import Template, flatten
from gpipe_cli.skip.skippable import SkipRoute, named_skippables
from gpipe_cli.skip.tracker import SkipName, use_skip_tracker
from gpipe_cli.torch_internals.autograd import next_number
from gpipe_cli.torch_internals.keyed_random import BACKWARD, KeyedRandom
from gpipe_cli.torch_internals.tensors import version_of

_NO_SKIPS = _KEEP = contextlib.nullcontext()
INPUT, LOSS, OUTPUT = "its input", "the loss function", "what its layers left"
BackwardWatch = Callable[[SavedForBackward, str], AbstractContextManager[object]]
"""Makes the context in which a backward, or the half of one that is named, runs."""


class LayerOutputs(NamedTuple):
    values: tuple[Tensor, ...]
    template: Template
    skips: tuple[Tensor | None, ...]
    """The skips that other partitions pop."""
    node_numbers: tuple[int, ...]
    registered_hooks: bool
    """Whether a hook was registered meanwhile, perhaps by another thread: a tensor does not tell whether it has any."""


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
        """Key and micro-batch of the running task; the task itself would keep its tensors alive."""
        self._node_numbers: tuple[int, ...] = ()
        """The numbers of the nodes of the graph whose backward is running."""
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
        numbers, hooks = [next_number()], RemovableHandle.next_id
        dropped = DroppedTensors() if checkpointing else None
        shared = _SharedTensors.of(inputs)
        with (
            Running(task.micro_batch, checkpointing, recomputing),
            _NO_SKIPS if skips is None else use_skip_tracker(skips),
            _KEEP if dropped is None else saved_tensors_hooks(dropped.pack, dropped.unpack),
            random,
        ):
            nothing_tied = task.untied.count(NOTHING_TIED) == len(self._layers)
            if self._all_watched and nothing_tied and leak_detector is None and shared is None:
                # The common case. For small layers, every line here counts.
                for layer in self._layers:
                    random.source = layer
                    value = layer.module(value)
                    numbers.append(next_number())
                    if dropped is not None:
                        dropped.drop()
            else:
                for layer, untied in zip(self._layers, task.untied, strict=True):
                    random.source = layer
                    with untied:
                        value = layer.module(value) if layer.is_watched else layer.watch(value)
                    numbers.append(next_number())
                    if shared is not None:
                        shared.refuse_writes(layer)
                    if leak_detector is not None:
                        leak_detector.check(layer, value)
                    if dropped is not None:
                        dropped.drop()
            if task.loss is not None:
                random.source = LOSS
                value = task.loss(value, task.micro_batch)
                numbers.append(next_number())
                if dropped is not None:
                    dropped.drop()
            values, template = flatten(value, "output")
            if not values:
                raise TypeError(f"expected Tensor, but got {type(value).__name__} as output")
            # Not the last layer any more: an error from here on is none of its own.
            random.source = OUTPUT
        sent = () if skips is None else skips.sent()
        return LayerOutputs(values, template, sent, tuple(numbers), RemovableHandle.next_id != hooks)

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
        return value, PartitionSkips(self._receives, received, self._sends)

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
class DroppedTensors:
    """What autograd saves in a checkpointed forward, dropped when the layer that saved it has returned.

    Until then it is kept, because a layer may run a backward of its own inside its forward.
    """

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots: list[list[Tensor]] = []

    def pack(self, tensor: Tensor) -> list[Tensor]:
        slot = [tensor]
        self._slots.append(slot)
        return slot

    def unpack(self, slot: list[Tensor]) -> Tensor:
        if not slot:
            raise RuntimeError(
                "a layer runs a backward through earlier layers inside its forward, and checkpointing has dropped "
                "what they saved. Use checkpoint='never', or put these layers into one"
            )
        return slot[0]

    def drop(self) -> None:
        for slot in self._slots:
            slot.clear()
        self._slots.clear()


@final
class _SharedTensors:
    """The received tensors that no layer may write, because their memory is also that of other tensors."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._versions = [version_of(tensor) for tensor in tensors]

    @classmethod
    def of(cls, inputs: Sequence[PartitionInput]) -> _SharedTensors | None:
        if not any(input.shared for input in inputs):
            return None
        tensors = [input.tensors[place] for input in inputs for place in input.shared]
        return cls([tensor for tensor in tensors if tensor is not None]) if tensors else None

    def refuse_writes(self, layer: Layer) -> None:
        if self._versions != [version_of(tensor) for tensor in self._tensors]:
            raise shared_memory_written(f"layer {layer!r}")


@final
class PartitionSkips:
    """A SkipTracker: what layers stash and pop while one partition runs one micro-batch."""

    __slots__ = ("_sent", "_values")

    def __init__(
        self, receives: Sequence[SkipRoute], received: Sequence[Tensor | None], sends: Sequence[SkipRoute]
    ) -> None:
        self._values = {route.name: value for route, value in zip(receives, received, strict=True)}
        self._sent: dict[SkipName, Tensor | None] = {route.name: None for route in sends}

    def save(self, name: SkipName, value: Tensor | None) -> None:
        target = self._sent if name in self._sent else self._values
        target[name] = value

    def load(self, name: SkipName) -> Tensor | None:
        return self._values.pop(name)

    def sent(self) -> tuple[Tensor | None, ...]:
        """What leaves the partition, in the order of its routes."""
        return tuple(self._sent.values())
