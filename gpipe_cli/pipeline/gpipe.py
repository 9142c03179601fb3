"""GPipe: an nn.Module that runs a sequence as a pipeline.

Decides what may be asked of a pipe and checks it. How a mini-batch is run is the runner's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, Self, final

import torch
from torch import nn

from gpipe_cli.pipeline.cutting import cut, make_partitions, place_buffers
from gpipe_cli.pipeline.devices import Device, choose_devices, denies_move
from gpipe_cli.pipeline.executor import Executor
from gpipe_cli.pipeline.microbatch import Value, moved, tensors_of
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.residence import Residence
from gpipe_cli.pipeline.runner import Runner
from gpipe_cli.pipeline.worked import WorkedSequence
from gpipe_cli.schedule import order, traits
from gpipe_cli.schedule.checkpoint import settled

__all__ = ["GPipe"]

_RECIPE = "Find one with gpipe_cli.balance, for example balance_by_time(module, sample, partitions=2)."


@final
class GPipe(WorkedSequence):
    """A sequence cut into partitions that work on micro-batches at the same time.

        pipe = GPipe(module, balance=[2, 3], chunks=8)
        output = pipe(input)                        # then loss_fn(output, target).backward()
        loss = pipe.step(input, target, loss_fn)    # forward and backward by the whole schedule

    `balance` is the number of layers per partition, `checkpoint` a mode for all of them or one for each. The input
    belongs on `devices[0]`, the output is on `devices[-1]`. Names of parameters are those of `module`.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str | Iterable[str] = "except_last",
        deferred_batch_norm: bool = False,
        schedule: str = "gpipe",
        residences: Sequence[Residence] = (),
    ) -> None:
        if balance is None:
            raise ValueError(f"balance is required: how many layers go to each partition. {_RECIPE}")
        super().__init__(module, chunks, deferred_batch_norm)
        self.balance = list(balance)
        self.checkpoint = settled(checkpoint, len(self.balance))
        self.schedule = str(schedule)
        repeats_devices = traits(self.schedule).several_per_device
        self._check_balance()
        count = len(self.balance)
        self.devices = choose_devices(devices, count, repeats=repeats_devices)
        views = cut(self.module, self._layers, self.balance)
        self._keep_views(views)
        self._place(views, only_buffers=bool(residences))
        self._runner = self._make_runner(views, residences)

    def _forward(self, input: Value) -> Value:
        output = super()._forward(input)
        # Interleaved partitions may end on another device than the last one.
        device = self.devices[-1] if self.devices else None
        if device is None or all(tensor.device == device for tensor in tensors_of(output)):
            return output
        return moved(output, device)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        if denies_move(args, kwargs):
            _deny_moving()
        return super().to(*args, **kwargs)

    def cuda(self, device: Device | None = None) -> NoReturn:
        _deny_moving()

    def cpu(self) -> NoReturn:
        _deny_moving()

    def _check_balance(self) -> None:
        if len(self) != sum(self.balance):
            raise ValueError(
                "module and sum of balance have different length "
                f"(module: {len(self)}, sum of balance: {sum(self.balance)}). {_RECIPE}"
            )
        if any(layers <= 0 for layers in self.balance):
            raise ValueError(f"all balance numbers must be positive integer (balance: {self.balance})")

    def _place(self, views: nn.ModuleList, *, only_buffers: bool) -> None:
        homes: dict[nn.Parameter, torch.device] = {}
        for index, view in enumerate(views):
            device = self.devices[index % len(self.devices)]
            for name, parameter in view.named_parameters():
                if homes.setdefault(parameter, device) != device:
                    raise ValueError(
                        f"parameter '{name}' is shared by partitions on {homes[parameter]} and {device}; "
                        "partitions that share parameters must be on one device"
                    )
            place_buffers(view, device) if only_buffers else view.to(device)

    def _make_runner(self, views: nn.ModuleList, residences: Sequence[Residence]) -> Runner:
        partitions = make_partitions(views, self._layers, self.balance, self.devices)
        # Without layers a pipe is the identity, and one partition without layers is just that.
        partitions = partitions or [Partition(index=0, layers=(), device=torch.device("cpu"))]
        executor = Executor(partitions, partial(order, self.schedule), max(1, len(self.devices)), residences)
        return Runner(partitions, executor, self._batch_norms)


def _deny_moving() -> NoReturn:
    raise TypeError("denied to move parameters and buffers, because GPipe should manage device placement")
