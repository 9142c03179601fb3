"""Pipes whose parameters are stored in host memory or on disk, and on a device only while a worker uses them.

The executor of every pipe runs them, so keys, recompute, skips and errors are the same.

    model = OffloadModel(sequence, torch.device("cuda:0"), num_slices=4, checkpoint_activation=True)
    optimizer = torch.optim.AdamW(model.parameters())       # of parameters in host memory
    loss_fn(model(input), target).backward()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Self, final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.devices import device_here
from gpipe_cli.accelerator.streams import finish_queued
from gpipe_cli.balance.solver import solve
from gpipe_cli.offload.prefetcher import SlicePrefetcher
from gpipe_cli.offload.sizing import layer_bytes
from gpipe_cli.offload.slices import SlicedParameters
from gpipe_cli.offload.tiers import CpuTier
from gpipe_cli.pipeline.action_loop import PartitionStore, PartitionVisit
from gpipe_cli.pipeline.boundary import PartitionInput
from gpipe_cli.pipeline.executor import Executor
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import MiniBatch, Value, moved
from gpipe_cli.pipeline.partitioning import move_to_devices, place_buffers
from gpipe_cli.pipeline.pipe import Output, Pipe
from gpipe_cli.schedule import ScheduleModule, order, traits
from gpipe_cli.schedule.action import Checkpoint
from gpipe_cli.schedule.orders import BY_SLICE
from gpipe_cli.torch_internals.tensors import exchanges_memory


def offloaded_pipe(
    module: nn.Sequential,
    balance: Sequence[int],
    *,
    devices: Sequence[torch.device],
    stores: Sequence[PartitionStore],
    schedule: str | ScheduleModule = BY_SLICE,
    chunks: int = 1,
    checkpoint: Checkpoint = "always",
    deferred_batch_norm: bool = False,
) -> Pipe:
    """stores: one per device, which bring its partitions there."""
    pipe = Pipe(module, chunks, deferred_batch_norm)
    executor = _executor(pipe, balance, devices, stores, schedule)
    return pipe._run_by(executor, list(devices), checkpoint)


def _executor(
    pipe: Pipe,
    balance: Sequence[int],
    devices: Sequence[torch.device],
    stores: Sequence[PartitionStore],
    schedule: str | ScheduleModule = BY_SLICE,
) -> Executor:
    workers = len(devices)
    placement = traits(schedule).placement(len(balance), workers)
    devices, stores = [devices[index] for index in placement], [stores[index] for index in placement]
    pipe._divide(balance)
    move_to_devices(pipe.partitions, devices, place_buffers)
    return Executor(pipe._partitions_on(devices), partial(order, schedule), workers, stores=stores)


@final
class OffloadModel(Pipe):
    """fairscale's class of that name, with its arguments and its error messages, not only for CUDA.

    Parameters, gradients and optimizer state are in host memory; one slice at a time is on the device.
    """

    def __init__(
        self,
        model: nn.Sequential | Sequence[nn.Module] | None,
        device: torch.device | None,
        offload_device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
        num_slices: int = 3,
        checkpoint_activation: bool = False,
        num_microbatches: int = 1,
    ) -> None:
        """model: a sequence, to be cut into slices of about equal bytes, or a list of modules that are the slices."""
        _check(model, device, offload_device, num_slices, checkpoint_activation, num_microbatches)
        assert model is not None and device is not None, "checked above"
        sequence = model if isinstance(model, nn.Sequential) else nn.Sequential(*model)
        super().__init__(sequence.to(offload_device), num_microbatches, deferred_batch_norm=False)
        self.device, self.offload_device = device_here(device), torch.device(offload_device)
        balance = [1] * len(sequence)
        if sequence is model:
            balance = solve(layer_bytes(sequence), min(num_slices, len(sequence))).balance
        parameters = SlicedParameters.of(sequence, balance)
        parameters.place_shared([self.device])
        self._shared, self._is_in_host_memory = list(parameters.shared), False
        tier = CpuTier([self.device])
        tier.reserve(sum(layer_bytes(sequence)))
        self._prefetcher = SlicePrefetcher(parameters.store(tier), tier, self.device)
        store = _WithGradients(self._prefetcher, self.device)
        executor = _executor(self, balance, [self.device], [store])
        self._run_by(executor, [self.device], "always" if checkpoint_activation else "never")

    def forward(self, *inputs: Any, **kwargs: Any) -> Output:
        if kwargs:
            raise TypeError(
                f"the layers of a sequence take no keyword arguments (given: {', '.join(kwargs)}); "
                "give tensors by position, or in a dict that the first layer takes"
            )
        return super().forward(moved(inputs[0] if len(inputs) == 1 else inputs, self.device))

    def _forward(self, batch: MiniBatch) -> Value:
        with self._parameters_in_host_memory():
            return super()._forward(batch)

    def _step(self, batch: MiniBatch, loss: StepLoss) -> None:
        with self._parameters_in_host_memory():
            super()._step(batch, loss)

    @contextmanager
    def _parameters_in_host_memory(self) -> Iterator[None]:
        if self._is_in_host_memory:
            self._move_residents(self.device)
        # The caller's optimizer has updated the parameters in host memory since they were last loaded.
        self._prefetcher.invalidate()
        yield
        # The caller may write them next, so no copy may still read them.
        finish_queued(self.device)

    def close(self) -> None:
        """End the threads that run and move slices."""
        super().close()
        self._prefetcher.close()

    def cpu(self) -> Self:
        """Move buffers and shared parameters to host memory, where the others are, until the model runs again."""
        self._move_residents(self.offload_device)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        asked = [value for value in (*args, *kwargs.values()) if not isinstance(value, bool)]
        names_cpu = len(asked) == 1 and isinstance(asked[0], str | torch.device)
        return (
            self.cpu() if names_cpu and torch.device(asked[0]).type == "cpu" else super().to(*args, **kwargs)
        )

    def _move_residents(self, device: torch.device) -> None:
        """Move what stays on the device between calls; layers that share a tensor go on sharing it."""
        for tensor in (*self._shared, *self.buffers()):
            gradient, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(device)
            tensor.grad = None if gradient is None else gradient.to(device)
        self._is_in_host_memory = device != self.device

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        raise TypeError("OffloadModel decides where its parameters are; move or convert the model before")


@final
class _WithGradients:
    """A `PartitionStore` whose gradients live with the parameters, and on the device only during a visit."""

    def __init__(self, prefetcher: SlicePrefetcher, device: torch.device) -> None:
        self._prefetcher, self._device = prefetcher, device

    def offload(self, input: PartitionInput) -> Callable[[], PartitionInput] | None:
        return self._prefetcher.offload(input)

    @contextmanager
    def on_device(self, visit: PartitionVisit, following: PartitionVisit | None) -> Iterator[None]:
        trained = self._prefetcher.slices[visit.partition].trained
        # A gradient has to be on its parameter's device, so it comes off while the parameter moves, and moves on its
        # own.
        before = [parameter.grad for parameter in trained]
        resting_devices = [parameter.device for parameter in trained]
        _set_gradients(trained, [None] * len(trained))
        after: Sequence[Tensor | None] = before
        try:
            with self._prefetcher.on_device(visit, following):
                _set_gradients(trained, [_moved(gradient, self._device) for gradient in before])
                yield
                after = [parameter.grad for parameter in trained]
                _set_gradients(trained, [None] * len(trained))
        finally:
            _set_gradients(trained, [None] * len(trained))
            _set_gradients(trained, [_moved(*pair) for pair in zip(after, resting_devices, strict=True)])
            if any(gradient is not None for gradient in after):
                # The host reads the gradients next; one wait for all of them.
                finish_queued(self._device)


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _moved(gradient: Tensor | None, device: torch.device) -> Tensor | None:
    return None if gradient is None else gradient.to(device, non_blocking=True)


def _check(
    model: Any,
    device: Any,
    offload_device: Any,
    num_slices: int,
    checkpoint_activation: bool,
    num_microbatches: int,
) -> None:
    for name, value in {"model": model, "device": device, "offload_device": offload_device}.items():
        if value is None:
            raise TypeError(f"`{name}` argument to `OffloadModel` cannot be None.")
    is_list = isinstance(model, list | tuple) and all(isinstance(layer, nn.Module) for layer in model)
    if not (isinstance(model, nn.Sequential) or is_list):
        raise TypeError("`model` argument to `OffloadModel` must be of type `nn.Sequential`.")
    if torch.device(offload_device).type != "cpu":
        raise TypeError(f"`offload_device` argument to `OffloadModel` must be a CPU (got {offload_device}).")
    if not exchanges_memory(torch.device(device)):
        raise TypeError(
            f"`device` argument to `OffloadModel` must be of a kind whose memory torch can give to a parameter of the "
            f"CPU (got {device}); the engine offload needs no such parameters."
        )
    if num_slices < 1:
        raise ValueError(f"`num_slices` argument to `OffloadModel` must be at least 1 (got {num_slices}).")
    if num_microbatches > 1 and not checkpoint_activation:
        raise RuntimeError("We currently only support microbatches with activation checkpointing.")
