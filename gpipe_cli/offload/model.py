"""OffloadModel: an nn.Module whose parameters live on one device and are used on another, slice by slice.

    model = OffloadModel(sequence, torch.device("cuda:0"), num_slices=4, checkpoint_activation=True)
    optimizer = torch.optim.AdamW(model.parameters())       # of parameters in host memory
    loss_fn(model(input), target).backward()

The way fairscale's class of that name is used, with its arguments and its complaints about them; any device will do.
Parameters, gradients and what an optimizer keeps are in host memory; one slice at a time is on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from gpipe_cli.balance.solver import solve
from gpipe_cli.offload.cut import parameters_of
from gpipe_cli.offload.pipe import OffloadedPipeBase
from gpipe_cli.offload.rotation import Rotation
from gpipe_cli.offload.sizing import layer_bytes
from gpipe_cli.offload.tiers import CpuTier
from gpipe_cli.pipeline.action_loop import PartitionVisit
from gpipe_cli.pipeline.boundary import PartitionInput
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import MiniBatch, Value, moved
from gpipe_cli.pipeline.pipe_module import Output

__all__ = ["OffloadModel"]


@final
class OffloadModel(OffloadedPipeBase):
    def __init__(
        self,
        model: nn.Sequential | Sequence[nn.Module] | None,
        device: torch.device | None,
        offload_device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
        num_slices: int = 3,
        checkpoint_activation: bool = False,
        num_microbatches: int = 1,
    ) -> None:
        """model: a sequence, cut into slices of about equal bytes, or a list of modules that are the slices."""
        _check(model, device, offload_device, num_slices, checkpoint_activation, num_microbatches)
        assert model is not None and device is not None, "checked above"
        sequence = model if isinstance(model, nn.Sequential) else nn.Sequential(*model)
        super().__init__(sequence.to(offload_device), num_microbatches, deferred_batch_norm=False)
        self.device, self.offload_device = torch.device(device), torch.device(offload_device)
        self.checkpoint = "always" if checkpoint_activation else "never"
        balance = [1] * len(sequence)
        if sequence is model:
            balance = solve(layer_bytes(sequence), min(num_slices, len(sequence))).balance
        parameters = parameters_of(sequence, balance)
        parameters.keep_shared([self.device])
        tier = CpuTier(self.device)
        self._rotation = Rotation(parameters.on(tier), tier, self.device)
        self._set_up(balance, [self.device], [_WithGradients(self._rotation, self.device)])

    def forward(self, *inputs: Any, **kwargs: Any) -> Output:
        if kwargs:
            raise TypeError(
                f"the layers of a sequence take no keyword arguments (given: {', '.join(kwargs)}); "
                "give tensors by position"
            )
        return super().forward(moved(inputs[0] if len(inputs) == 1 else inputs, self.device))

    # Whoever trains has updated the parameters where they live since they were brought in.
    def _forward(self, input: Value) -> Value:
        self._rotation.forget()
        return super()._forward(input)

    def _step(self, batch: MiniBatch, loss: StepLoss) -> None:
        self._rotation.forget()
        super()._step(batch, loss)

    def close(self) -> None:
        """End the threads that run and move slices."""
        super().close()
        self._rotation.close()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        raise TypeError("OffloadModel decides where its parameters are; move or convert the model before")


@final
class _WithGradients:
    """A residence whose gradients live with the parameters: on the device only while they are added to."""

    def __init__(self, rotation: Rotation, device: torch.device) -> None:
        self._rotation, self._device = rotation, device

    def offload(self, input: PartitionInput) -> Callable[[], PartitionInput] | None:
        return self._rotation.offload(input)

    @contextmanager
    def on_device(self, visit: PartitionVisit, following: PartitionVisit | None) -> Iterator[None]:
        trained = self._rotation.slices[visit.partition].trained
        before = [parameter.grad for parameter in trained]
        homes = [parameter.device for parameter in trained]
        _set_gradients(trained, [None] * len(trained))
        after: Sequence[Tensor | None] = before
        try:
            with self._rotation.on_device(visit, following):
                _set_gradients(trained, [_moved(one, self._device) for one in before])
                yield
                after = [parameter.grad for parameter in trained]
                _set_gradients(trained, [None] * len(trained))
        finally:
            _set_gradients(trained, [None] * len(trained))
            _set_gradients(trained, [_moved(one, home) for one, home in zip(after, homes, strict=True)])


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _moved(gradient: Tensor | None, device: torch.device) -> Tensor | None:
    return None if gradient is None else gradient.to(device)


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
    is_list = isinstance(model, list | tuple) and all(isinstance(one, nn.Module) for one in model)
    if not (isinstance(model, nn.Sequential) or is_list):
        raise TypeError("`model` argument to `OffloadModel` must be of type `nn.Sequential`.")
    if torch.device(offload_device).type != "cpu":
        raise TypeError(f"`offload_device` argument to `OffloadModel` must be a CPU (got {offload_device}).")
    if num_slices < 1:
        raise ValueError(f"`num_slices` argument to `OffloadModel` must be at least 1 (got {num_slices}).")
    if num_microbatches > 1 and not checkpoint_activation:
        raise RuntimeError("We currently only support microbatches with activation checkpointing.")
