"""GPipe, the pipe whose partitions run in worker threads, and the plain pipe that the calling thread runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, Self, final

import torch
from torch import nn

from gpipe_cli.accelerator.devices import Device, asks_for_device, choose_devices
from gpipe_cli.pipeline.executor import Executor
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.partitioning import move_to_devices
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.schedule import ScheduleModule, order, traits
from gpipe_cli.schedule.action import ScheduleTraits, checked_checkpoint
from gpipe_cli.schedule.orders import one_by_one
from gpipe_cli.sequential.by_list import Item, listed_layers

_BALANCE_HINT = "Find one with gpipe_cli.balance, for example balance_by_time(module, sample, partitions=2)."


@final
class GPipe(Pipe):
    """A sequence split into partitions that work on micro-batches at the same time.

        pipe = GPipe(module, balance=[2, 3], chunks=8)
        output = pipe(input)                        # then loss_fn(output, target).backward()
        loss = pipe.step(input, target, loss_fn)    # forward and backward by the whole schedule

    `module` may also be a list of modules, functions and factories: see `gpipe_cli.sequential.listed_layers`.
    `balance` is the number of layers per partition, `checkpoint` a mode for all of them or one for each. The input
    must be on `input_device`; the output is on `output_device`. Parameters keep the names they have in `module`.
    """

    def __init__(
        self,
        module: nn.Sequential | Sequence[Item],
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str | Iterable[str] = "except_last",
        deferred_batch_norm: bool = False,
        schedule: str | ScheduleModule = "gpipe",
        step_timeout: float | None = None,
    ) -> None:
        """schedule: a name, or a single order such as `schedule.files.read_schedule` returns."""
        if balance is None:
            raise ValueError(f"balance is required: how many layers go to each partition. {_BALANCE_HINT}")
        if isinstance(module, list | tuple):
            module = listed_layers(module)
        super().__init__(module, chunks, deferred_batch_norm)  # type: ignore[arg-type]  # which it checks
        self.balance = list(balance)
        modes = checked_checkpoint(checkpoint, len(self.balance))
        schedule_traits = traits(schedule)
        self.schedule = schedule if isinstance(schedule, str) else schedule_traits.name
        self._check_balance()
        chosen = choose_devices(devices, len(self.balance), repeats=schedule_traits.several_per_device)
        placed = placed_devices(schedule_traits, chosen, len(self.balance))
        self._divide(self.balance)
        move_to_devices(self.partitions, placed)
        # Without layers a pipe is the identity, and so is a partition without layers.
        partitions = self._partitions_on(placed) or [
            Partition(index=0, layers=(), device=torch.device("cpu"))
        ]
        executor = Executor(partitions, partial(order, schedule), workers=max(1, len(chosen)))
        executor.timeout = step_timeout
        self._run_by(executor, chosen, modes)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        if asks_for_device(args, kwargs):
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
                f"(module: {len(self)}, sum of balance: {sum(self.balance)}). {_BALANCE_HINT}"
            )
        if any(layers <= 0 for layers in self.balance):
            raise ValueError(f"all balance numbers must be positive integer (balance: {self.balance})")


def plain_pipe(
    module: nn.Sequential,
    balance: Sequence[int] | None = None,
    *,
    chunks: int = 1,
    checkpoint: str = "never",
    deferred_batch_norm: bool = False,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
) -> Pipe:
    """Make a pipe whose layers the calling thread runs on one device, one micro-batch at a time.

    Results of every other engine are bitwise identical to its: it uses the same micro-batches and keys, and runs
    backward in ascending order.

    balance: None makes one partition of all layers.
    device: where the module is; the current device while its layers run.
    """
    pipe = Pipe(module, chunks, deferred_batch_norm)
    balance = [len(pipe)] if balance is None else balance
    pipe._divide(balance)
    executor = Executor(
        pipe._partitions_on([device]),
        lambda partitions, chunks, workers: one_by_one(partitions, chunks, devices=1),
        workers=0,
    )
    return pipe._run_by(executor, [device], checked_checkpoint(checkpoint, len(balance)))


def placed_devices(
    schedule: ScheduleTraits, devices: list[torch.device], partitions: int
) -> list[torch.device]:
    """The device of each partition under an order with its own placement; otherwise `devices`, dealt round robin."""
    if schedule.workers is None:
        return devices
    placed, used = len(schedule.workers), max(schedule.workers) + 1
    if (placed, used) != (partitions, len(devices)):
        raise ValueError(
            f"schedule {schedule.name!r} has {placed} partitions on {used} devices, "
            f"but balance has {partitions} and there are {len(devices)} devices"
        )
    return [devices[worker] for worker in schedule.workers]


def _deny_moving() -> NoReturn:
    raise TypeError("denied to move parameters and buffers, because GPipe should manage device placement")
