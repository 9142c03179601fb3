"""The loss of a step, one micro-batch at a time.

The mean loss of a micro-batch is weighted by its rows, so loss and gradients are those of the whole mini-batch. A loss
that is a mean of something else, such as the tokens it scores, says how many of them each row has: see `WeighingLoss`.
torch's cross entropies are means over the targets that they do not ignore. Sums are added up.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli.pipeline.context import MicroBatch, is_recomputing
from gpipe_cli.pipeline.microbatch import Batch, MiniBatch, Value, tensors_of
from gpipe_cli.pytree import map_tensors, unflatten
from gpipe_cli.sequential import original_output
from gpipe_cli.values import FACTORS

LossFunction = Callable[[Any, Any], Tensor]
Reduction: TypeAlias = Literal["mean", "sum"]


class WeighingLoss(Protocol):
    def __call__(self, output: Any, target: Any, /) -> Tensor: ...
    def row_weights(self, target: Any, /) -> Tensor:
        """For each row of the target, the number of terms that the loss is a mean of, which may be 0."""


def row_weights(loss: object, target: Value, rows: int) -> Tensor:
    """How much each row counts in the mean over a mini-batch: 1, unless the loss says otherwise.

    Where the target is on an accelerator, the caller waits for it when it reads the result.
    """
    # Not isinstance: Python takes longer to look at a protocol than this step of a small model may.
    weigh = getattr(loss, "row_weights", None)
    if weigh is None:
        counted = _counted_targets(loss, target)
        return torch.ones(rows, dtype=torch.int64) if counted is None else counted.reshape(rows, -1).sum(1)
    weights = weigh(target)
    if not isinstance(weights, Tensor) or weights.shape != (rows,):
        raise ValueError(
            f"row_weights of the loss must give one number for each of {rows} rows, got {_shape(weights)}"
        )
    return weights


def _counted_targets(loss: Any, target: Value) -> Tensor | None:
    """How much each class index counts in the mean of one of torch's cross entropies; None for any other loss."""
    function, arguments = _taken_apart(loss)
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        arguments = {"weight": loss.weight, "ignore_index": loss.ignore_index}
    elif function not in (functional.cross_entropy, functional.nll_loss):
        return None
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None  # the mean over probabilities is one over rows
    counted = target != arguments.get("ignore_index", -100)
    weight = arguments.get("weight")
    return counted if weight is None else torch.where(counted, weight[target * counted], 0).double()


def _taken_apart(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The function that a loss calls, and the keyword arguments it gives."""
    return (loss.func, loss.keywords) if isinstance(loss, functools.partial) else (loss, {})


def _check_reduction(loss: Any, reduction: Reduction) -> None:
    """Raise if a loss is known to reduce in another way than the caller of `step` says."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    function, arguments = _taken_apart(loss)
    own = arguments.get("reduction", getattr(function, "reduction", None))
    if own in ("mean", "sum", "none") and own != reduction:
        hint = "use a loss that gives one number" if own == "none" else f"call step with reduction={own!r}"
        raise ValueError(
            f"the loss has reduction={own!r}, but step takes it for the {reduction} of a micro-batch; {hint}"
        )


def called_modules(loss: Any) -> Iterable[nn.Module]:
    """The modules that a loss function calls as far as its code names them. Recompute must not change their buffers."""
    if hasattr(loss, "modules"):
        return loss.modules()  # type: ignore[no-any-return]
    if isinstance(loss, functools.partial):
        named: Iterable[Any] = (loss.func, *loss.args, *loss.keywords.values())
    elif inspect.isfunction(loss):
        variables = inspect.getclosurevars(loss)
        named = (*variables.nonlocals.values(), *variables.globals.values())
    else:
        named = (getattr(loss, "__self__", None),)
    return [module for each in named if isinstance(each, nn.Module) for module in each.modules()]


@final
class StepLoss:
    """Computes and keeps the losses of one step, in the order of the micro-batches. One thread uses it."""

    def __init__(
        self,
        module: nn.Sequential,
        loss: LossFunction,
        target: Value,
        input: MiniBatch,
        reduction: Reduction = "mean",
        *,
        keeps_outputs: bool = False,
    ) -> None:
        """loss: the caller's, which may be a `WeighingLoss`."""
        _check_reduction(loss, reduction)
        batch, count = Batch(target, "target"), len(input.micro_batches)
        if batch.rows != input.rows:
            raise ValueError(
                f"target and input must agree on the batch size (target: {batch.rows}, input: {input.rows})"
            )
        self._module, self._loss = module, loss
        self._targets = [unflatten(batch.template, tensors) for tensors in batch.scatter(count)]
        self.modules = list(called_modules(loss))
        if reduction == "mean":
            weights = row_weights(loss, target, input.rows)
            self._weights = [sum(part.tolist()) for part in weights.tensor_split(count)]
        else:
            self._weights = [1] * count
        self.total_weight: float = sum(self._weights) if reduction == "mean" else 1
        """The mini-batch's weight; a replica with part of a larger mini-batch sets that of the larger one."""
        self._keeps_outputs = keeps_outputs
        self._losses: list[Tensor] = []
        self.outputs: list[Value] = []
        """The outputs of all micro-batches, if `keeps_outputs`."""

    def weighted(self, output: Value, micro_batch: MicroBatch) -> Tensor:
        """The micro-batch's share of the loss of the mini-batch, with its graph."""
        loss = self._loss(original_output(self._module, output), self._targets[micro_batch.index])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"loss_fn must give one number per call, got {_shape(loss)}")
        weight = self._weights[micro_batch.index]
        # The mean of no terms may be nan, and its gradient too; times 0 both would stay nan.
        number = loss if loss.dim() == 0 else loss.reshape(())
        weighted = number * (weight / self.total_weight) if weight else _zero(output, loss)
        if not is_recomputing():
            self._losses.append(weighted.detach())
            if self._keeps_outputs:
                self.outputs.append(map_tensors(Tensor.detach, output))
        return weighted

    def total(self) -> Tensor:
        """The sum of the losses so far, detached: that of the mini-batch once all its micro-batches have run."""
        return torch.stack(self._losses).sum() if self._losses else torch.zeros(())


def _zero(output: Value, loss: Tensor) -> Tensor:
    """Zero, with zeros as the gradients of the output and of what the loss multiplies it with."""
    tensors = [each for tensor in tensors_of(output) for each in (tensor, *getattr(tensor, FACTORS, ()))]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    return sum((tensor.flatten()[:0].sum().to(loss.dtype) for tensor in trained), start=loss.new_zeros(()))


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
