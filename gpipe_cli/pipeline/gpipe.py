"""GPipe: an nn.Module that runs a sequence of layers as a pipeline. `step` and `forward` begin here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, NoReturn, Self, final, overload

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.devices import Device, asks_for_device, choose_devices
from gpipe_cli.pipeline.action_loop import Recorder
from gpipe_cli.pipeline.executor import Executor
from gpipe_cli.pipeline.layer_logging import log_layer_times
from gpipe_cli.pipeline.loss import LossFunction, Reduction, StepLoss
from gpipe_cli.pipeline.microbatch import MiniBatch, Value, tensors_of
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.partitioning import make_partitions, move_to_devices, partition_modules
from gpipe_cli.pipeline.pipe_module import Output, PipeModule, refuse_hooks
from gpipe_cli.schedule import ScheduleModule, order, traits
from gpipe_cli.schedule.action import Checkpoint, ScheduleTraits, checked_checkpoint
from gpipe_cli.schedule.orders import one_by_one
from gpipe_cli.torch_internals.dispatch_modes import active_transform
from gpipe_cli.torch_internals.gradient_reducers import is_inside_ddp

_BALANCE_HINT = "Find one with gpipe_cli.balance, for example balance_by_time(module, sample, partitions=2)."


class PipeBase(PipeModule):
    """`step` and `forward` of every pipe; what surrounds them as an nn.Module is in `pipe_module`."""

    @overload
    def step(
        self,
        input: Value,
        target: Value,
        loss_fn: LossFunction,
        key: int | None = None,
        return_output: Literal[False] = False,
        *,
        reduction: Reduction = "mean",
    ) -> Tensor: ...

    @overload
    def step(
        self,
        input: Value,
        target: Value,
        loss_fn: LossFunction,
        key: int | None = None,
        *,
        return_output: Literal[True],
        reduction: Reduction = "mean",
    ) -> tuple[Tensor, Output]: ...

    def step(
        self,
        input: Value,
        target: Value,
        loss_fn: LossFunction,
        key: int | None = None,
        return_output: bool = False,
        *,
        reduction: Reduction = "mean",
    ) -> Tensor | tuple[Tensor, Output]:
        """Run forward and backward of a mini-batch: fill `.grad` and return the detached loss.

        key: determines all random numbers of the step; drawn from torch's default generator if None.
        reduction: whether `loss_fn` gives the mean or the sum of a micro-batch; so is the loss of the mini-batch.
        """
        self._check_layers()
        batch = self._mini_batch(input, key)
        loss = self._step_loss(batch, target, loss_fn, reduction, return_output)
        self._step(batch, loss)
        return self._step_result(loss, return_output)

    def forward(self, input: Value) -> Output:
        self._check_layers()
        if self.chunks > 1 and torch.is_grad_enabled() and is_inside_ddp():
            # Its reducer takes the gradients of the first micro-batch for those of the whole mini-batch.
            raise RuntimeError(
                "DistributedDataParallel around a pipe gives wrong gradients, since a pipe runs a backward for each "
                "micro-batch; leave it out, and average the gradients after backward, or train with "
                "gpipe train engine=processes data_parallel=2"
            )
        # Without layers there is nothing to split the input for.
        return self._original_output(self._forward(input)) if self._layers else input

    def _mini_batch(self, input: Value, key: int | None = None) -> MiniBatch:
        transform = active_transform(lambda: (*tensors_of(input), *self.parameters()))
        if transform is not None:
            raise RuntimeError(
                f"{transform} does not go through a pipe, whose layers run in other threads. Apply it to the layers, "
                "or to the module without a pipe"
            )
        return MiniBatch.of(input, self.chunks, key, self.least_rows if self.training else 1)

    @abstractmethod
    def log_layers(self) -> None:
        """From now on, log each layer that this process runs, with its time."""

    @abstractmethod
    def _forward(self, input: Value) -> Value:
        """The output of the last layer; () if that layer is in another process."""

    @abstractmethod
    def _step(self, batch: MiniBatch, loss: StepLoss) -> None:
        """Run the mini-batch forward and backward with `loss`."""


class ThreadedPipe(PipeBase):
    """A pipe whose partitions an executor runs, in worker threads or in the calling thread.

    Subclasses set these attributes in their constructor.
    """

    checkpoint: Checkpoint
    devices: list[torch.device]
    partitions: nn.ModuleList
    _executor: Executor

    def _forward(self, input: Value) -> Value:
        batch = self._mini_batch(input)
        return self._executor.forward(batch, self._checkpoint_stops(batch))

    def _step(self, batch: MiniBatch, loss: StepLoss) -> None:
        self._executor.step(batch, loss, self._checkpoint_stops(batch))

    def _checkpoint_stops(self, batch: MiniBatch) -> tuple[int, ...]:
        return batch.checkpoint_stops(self.checkpoint, len(self._executor.partitions), self.training)

    def _set_partitions(self, modules: nn.ModuleList) -> None:
        for index, module in enumerate(modules):
            refuse_hooks(module, f"pipe.partitions[{index}]")
        # Not a registered child: the layers already are children of `module`, under their own names.
        self.__dict__["partitions"] = modules

    def _layer_containers(self) -> list[Iterable[nn.Module]]:
        return [self.module, chain(*self.partitions)]

    @property
    def partition_devices(self) -> dict[int, torch.device]:
        """The device of each partition, by its index."""
        return {partition.index: partition.device for partition in self._executor.partitions}

    @property
    def input_device(self) -> torch.device:
        """The device of the first partition. Inputs must be there."""
        return self._executor.partitions[0].device

    @property
    def output_device(self) -> torch.device:
        """The device of the last partition. The targets of a step must be there."""
        return self._executor.partitions[-1].device

    @property
    def step_timeout(self) -> float | None:
        """Seconds after which a call raises StepTimeout if its workers have not ended; None waits without limit."""
        return self._executor.timeout

    @step_timeout.setter
    def step_timeout(self, seconds: float | None) -> None:
        self._executor.timeout = seconds

    @property
    def recorder(self) -> Recorder | None:
        """Called after every action; None costs nothing."""
        return self._executor.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._executor.recorder = recorder

    def log_layers(self) -> None:
        log_layer_times(self._executor.partitions)

    def close(self) -> None:
        """End the workers. You may close a pipe twice; using it again starts new ones."""
        self._executor.close()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.partitions.train(mode)
        return self


@final
class GPipe(ThreadedPipe):
    """A sequence split into partitions that work on micro-batches at the same time.

        pipe = GPipe(module, balance=[2, 3], chunks=8)
        output = pipe(input)                        # then loss_fn(output, target).backward()
        loss = pipe.step(input, target, loss_fn)    # forward and backward by the whole schedule

    `balance` is the number of layers per partition, `checkpoint` a mode for all of them or one for each. The input
    must be on `input_device`; the output is on `output_device`. Parameters keep the names they have in `module`.
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
        schedule: str | ScheduleModule = "gpipe",
        step_timeout: float | None = None,
    ) -> None:
        """schedule: a name, or a single order such as `schedule.files.read_schedule` returns."""
        if balance is None:
            raise ValueError(f"balance is required: how many layers go to each partition. {_BALANCE_HINT}")
        super().__init__(module, chunks, deferred_batch_norm)
        self.balance = list(balance)
        self.checkpoint = checked_checkpoint(checkpoint, len(self.balance))
        schedule_traits = traits(schedule)
        self.schedule = schedule if isinstance(schedule, str) else schedule_traits.name
        self._check_balance()
        self.devices = choose_devices(devices, len(self.balance), repeats=schedule_traits.several_per_device)
        placed = placed_devices(schedule_traits, self.devices, len(self.balance))
        modules = partition_modules(self.module, self._layers, self.balance)
        self._set_partitions(modules)
        move_to_devices(modules, placed)
        partitions = make_partitions(modules, self._layers, self.balance, placed)
        # Without layers a pipe is the identity, and so is a partition without layers.
        partitions = partitions or [Partition(index=0, layers=(), device=torch.device("cpu"))]
        workers = max(1, len(self.devices))
        self._executor = Executor(partitions, partial(order, schedule), workers, self._batch_norms)
        self.step_timeout = step_timeout

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


@final
class PlainPipe(ThreadedPipe):
    """The whole sequence on one device, run by the calling thread, one micro-batch at a time.

    Every other engine is compared with it, to the bit: it uses the same micro-batches and keys, and runs backward in
    ascending order.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None = None,
        *,
        chunks: int = 1,
        checkpoint: str = "never",
        deferred_batch_norm: bool = False,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
    ) -> None:
        """balance: None makes one partition of all layers.
        device: where the module is; the current device while its layers run.
        """
        super().__init__(module, chunks, deferred_batch_norm)
        balance = [len(self)] if balance is None else balance
        self.checkpoint = checked_checkpoint(checkpoint, len(balance))
        self.devices = [device]
        modules = partition_modules(self.module, self._layers, balance)
        self._set_partitions(modules)
        self._executor = Executor(
            make_partitions(modules, self._layers, balance, self.devices),
            lambda partitions, chunks, workers: one_by_one(partitions, chunks, devices=1),
            workers=0,
            batch_norms=self._batch_norms,
        )


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
