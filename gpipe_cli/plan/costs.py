"""What layers, and partitions of them, cost for one micro-batch of one size: measured or estimated. Pure Python."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, final

from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec


@final
@dataclass(frozen=True)
class BackwardSplit:
    """The duration of the parts of a split backward, as multiples of the whole."""

    input_grad: float = 0.5
    weight_grad: float = 0.5


@final
@dataclass(frozen=True)
class TransferCost:
    """How long tensors take from one device to another."""

    latency_ms: float
    bytes_per_second: float

    def ms(self, bytes: float) -> float:
        return self.latency_ms + 1000 * bytes / self.bytes_per_second


@final
class UpdateCosts:
    """What follows the last backward: the sum of gradients over replicas, and the optimizer. Milliseconds."""

    def __init__(
        self,
        optimizer: Sequence[float],
        reduce: Sequence[float] | None = None,
        *,
        overlaps: bool = False,
        shared: float = 0.0,
    ) -> None:
        """One number per layer each. `overlaps`: gradients are summed while the last backward still runs.

        `shared` sums the gradients of parameters that layers in several partitions share.
        """
        self._optimizer, self._overlaps, self.shared = _up_to(optimizer), overlaps, shared
        self._reduce = _up_to(reduce or [0.0] * len(optimizer))

    def partition(self, begin: int, end: int, backward: float) -> float:
        """`backward` is that of one micro-batch."""
        reduce = self._reduce[end] - self._reduce[begin]
        hidden = min(reduce, backward) if self._overlaps else 0.0
        return self._optimizer[end] - self._optimizer[begin] + reduce - hidden

    @property
    def least(self) -> float:
        """The part of all layers' update that cannot be hidden."""
        return self._optimizer[-1] + (0.0 if self._overlaps else self._reduce[-1])


class PrefixSums(NamedTuple):
    """Sums of the costs of one micro-batch, up to each layer."""

    forward: list[float]
    backward: list[float]


@final
class LayerCosts:
    """Milliseconds."""

    def __init__(
        self,
        forward: Sequence[float],
        backward: Sequence[float],
        recompute: Sequence[float] | None = None,
        transfer: Sequence[float] | None = None,
        split: BackwardSplit | None = None,
        checkpointed: tuple[Sequence[float], Sequence[float]] | None = None,
        frozen_layers: int = 0,
        update: UpdateCosts | None = None,
        host: Sequence[float] | None = None,
        spread: float = 0.0,
    ) -> None:
        """One number per layer each. `recompute` defaults to another forward; `transfer` is that of the layer's output.

        `checkpointed` is forward and backward with a recomputation between them, by default the same as without: such
        a forward saves less, and the caches hold other data. A partition within the first `frozen_layers` has no
        backward, so it recomputes nothing. `update` follows the last backward of a step.
        `host` is how long the process that drives all devices takes to launch the forward of each layer.
        `spread` is the share by which measurements of the same differ; nothing else is known of an estimate's error.
        """
        self.layers = len(forward)
        self._columns = (forward, backward, recompute or forward, *(checkpointed or (forward, backward)))
        self._by_device: Sequence[LayerCosts] = ()
        self.equal_devices = True
        """Whether a layer takes as long on every device of the pipeline."""
        self.without_recompute = PrefixSums(_up_to(forward), _up_to(backward))
        """The sums for partitions that recompute nothing."""
        self.checkpointed = (
            self.without_recompute if checkpointed is None else PrefixSums(*map(_up_to, checkpointed))
        )
        """The sums for partitions that recompute some micro-batches, without the recomputation."""
        self.least = self.without_recompute
        if checkpointed is not None:
            pairs = zip((forward, backward), checkpointed, strict=True)
            self.least = PrefixSums(*(_up_to(list(map(min, *pair))) for pair in pairs))
        self.frozen_layers = frozen_layers
        self._recompute = _up_to(forward if recompute is None else recompute)
        self._transfer = [0.0] * self.layers if transfer is None else list(transfer)
        self.split = split or BackwardSplit()
        self.update, self.spread = update, spread
        self._host = None if host is None else _up_to(host)

    @classmethod
    def mixed(cls, devices: Sequence[LayerCosts]) -> LayerCosts:
        """The costs of a pipeline whose devices differ, in order; what is asked of all of them is the least of each."""
        columns = zip(*(device._columns for device in devices), strict=True)
        forward, backward, recompute, *checkpointed = map(_least, columns)
        costs = cls(
            forward,
            backward,
            recompute,
            transfer=_least([device._transfer for device in devices]),
            split=BackwardSplit(
                min(device.split.input_grad for device in devices),
                min(device.split.weight_grad for device in devices),
            ),
            checkpointed=(checkpointed[0], checkpointed[1]),
            frozen_layers=devices[0].frozen_layers,
            spread=max(device.spread for device in devices),
        )
        costs._by_device = devices
        costs.equal_devices = all(device._columns == devices[0]._columns for device in devices)
        return costs

    def grouped(self, borders: Sequence[int]) -> LayerCosts:
        """The costs of groups of layers, which begin and end at these layers; the first frozen layer is a border."""
        other = copy.copy(self)
        other.layers = len(borders) - 1
        other.without_recompute, other.checkpointed, other.least = (
            PrefixSums(*([column[border] for border in borders] for column in sums))
            for sums in (self.without_recompute, self.checkpointed, self.least)
        )
        other._recompute = [self._recompute[border] for border in borders]
        other._transfer = [self._transfer[border - 1] for border in borders[1:]]
        other.frozen_layers = borders.index(self.frozen_layers)
        # Bounds of the groups need no update and no host, which only lengthen a step.
        other.update = other._host = None
        other._by_device = [device.grouped(borders) for device in self._by_device]
        return other

    def on(self, partition: int) -> LayerCosts:
        """The costs on the device of a partition; devices take partitions in turn."""
        return self._by_device[partition % len(self._by_device)] if self._by_device else self

    def recompute(self, begin: int, end: int) -> float:
        """The cost of recomputing one micro-batch on a partition."""
        return self._recompute[end] - self._recompute[begin] if end > self.frozen_layers else 0.0

    def partition(self, begin: int, end: int, checkpoint_stop: int = 0) -> PartitionCost:
        sums = self.checkpointed if checkpoint_stop else self.without_recompute
        backward = sums.backward[end] - sums.backward[begin]
        # Nothing before the first trained layer waits for a gradient, so its partition leaves that of its input out.
        split = self.split if begin > self.frozen_layers else BackwardSplit(0.0, 1.0)
        return PartitionCost(
            sums.forward[end] - sums.forward[begin],
            backward,
            recompute=self.recompute(begin, end),
            transfer=self._transfer[end - 1],
            input_grad=split.input_grad * backward,
            weight_grad=split.weight_grad * backward,
        )

    def update_ms(self, balance: Sequence[int], spec: PipelineSpec) -> float:
        """From the last backward to the end of the step: the device with the most parameters ends last."""
        devices = spec.devices or spec.partitions
        workers = spec.traits.placement(spec.partitions, devices)
        by_device = [0.0] * devices
        for partition, (begin, end) in enumerate(pairwise([0, *accumulate(balance)])):
            costs = self.on(partition)
            if costs.update is not None:
                backward = costs.without_recompute.backward
                update = costs.update.partition(begin, end, backward[end] - backward[begin])
                by_device[workers[partition]] += update
        shared = self.on(0).update if spec.partitions > 1 else None
        return max(by_device) + (shared.shared if shared else 0.0)

    def host_ms(self, balance: Sequence[int], spec: PipelineSpec) -> float:
        """No step is shorter: one process launches the forwards of all devices, one after the other.

        Only one thread at a time runs Python, so forwards and recomputations wait for each other. Backwards do not:
        autograd has a thread for each device, which needs no Python.
        """
        host = self.on(0)._host
        if host is None:
            return 0.0
        ranges = pairwise([0, *accumulate(balance)])
        recomputed = sum(
            stop * (host[end] - host[begin])
            for (begin, end), stop in zip(ranges, spec.checkpointed_counts, strict=True)
            if end > self.frozen_layers
        )
        return recomputed + self.least_host_ms(spec)

    def least_host_ms(self, spec: PipelineSpec) -> float:
        """A lower bound of `host_ms` for any balance, whatever it recomputes."""
        host = self.on(0)._host
        return 0.0 if host is None else spec.micro_batches * host[-1]

    def least_update_ms(self, devices: int) -> float:
        """A bound of the above for any balance."""
        updates = [costs.update for costs in self._by_device or [self]]
        return min(0.0 if update is None else update.least for update in updates) / devices

    def partitions(self, balance: Sequence[int], spec: PipelineSpec) -> list[PartitionCost]:
        borders = pairwise([0, *accumulate(balance)])
        return [
            self.on(partition).partition(begin, end, stop)
            for partition, ((begin, end), stop) in enumerate(
                zip(borders, spec.checkpointed_counts, strict=True)
            )
        ]


def _up_to(numbers: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(numbers)]


def _least(columns: Sequence[Sequence[float]]) -> list[float]:
    return [min(numbers) for numbers in zip(*columns, strict=True)]
