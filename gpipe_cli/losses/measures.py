"""What losses share: the protocol of those that measure, the metrics for each kind of task, and the shape check.

Every metric is a sum over what the loss is a mean of, so it does not depend on how samples are divided into batches.
Positions with the label -100 count neither in a loss nor in a metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from gpipe_cli.errors import DataError
from gpipe_cli.values import IGNORED_LABEL

Measure = Callable[[Any, Tensor], Mapping[str, float]]
_NUMBER_LOSSES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_CLASS_LOSSES = (nn.CrossEntropyLoss,)
_TOP = 5
"""Of so many classes or fewer, each is among the best so many."""
_ONE_TENSOR = (
    "give loss=own if the model computes its own loss from the targets, or let it return the scores of all positions "
    "and nothing else"
)


@runtime_checkable
class MeasuringLoss(Protocol):
    def __call__(self, output: Any, target: Tensor, /) -> Tensor:
        """Return the mean over the samples, or over what `row_weights` counts if the loss has that method."""

    def measure(self, output: Any, target: Tensor, /) -> Mapping[str, float]:
        """Return sums over the same, by the name under which gpipe reports each mean."""


def measure_of(loss: object) -> Measure:
    """Return the loss's own `measure`, or `accuracy` for a loss without one, such as those of torch."""
    return loss.measure if isinstance(loss, MeasuringLoss) else accuracy


def predicts_numbers(loss: object) -> bool | None:
    """Whether targets are numbers, not classes; a loss may say so with an attribute of this name. None: unknown."""
    if isinstance(loss, _NUMBER_LOSSES):
        return True
    if isinstance(loss, _CLASS_LOSSES):
        return False
    declared = getattr(loss, "predicts_numbers", None)
    return declared if isinstance(declared, bool) else None


def scores_of(output: Any) -> Any:
    """The logits in the output of a model of transformers, and the tensor in (logits, None); else the output itself."""
    if isinstance(output, Mapping):
        return output.get("logits", output)
    members = [member for member in output if member is not None] if type(output) in (tuple, list) else []
    return members[0] if len(members) == 1 else getattr(output, "logits", output)


def main_scores(output: Any) -> Any:
    """The scores of the main head: of a tuple or dict, the first, as for loss=auxiliary."""
    output = scores_of(output)
    if isinstance(output, Mapping):
        output = next(iter(output.values()), None)
    return output[0] if isinstance(output, tuple) and output else output


def scored_labels(target: Tensor) -> Tensor:
    """For each sample, the number of its labels that are not ignored."""
    return (target != IGNORED_LABEL).unsqueeze(-1).flatten(1).sum(1)


def accuracy(output: Any, target: Tensor) -> dict[str, float]:
    """Count the samples whose class has the highest score and, of more than five classes, one of the five highest.

    Return nothing if the target is not one class per sample, as in a regression.
    """
    if not isinstance(output, Tensor) or output.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        return {}
    best = output.detach().topk(min(_TOP, output.shape[1]), dim=1).indices
    correct = best == target.unsqueeze(1)
    top1 = {"top1": float(correct[:, :1].sum())}
    return {**top1, f"top{_TOP}": float(correct.sum())} if output.shape[1] > _TOP else top1


def token_accuracy(scores: Tensor, target: Tensor) -> dict[str, float]:
    """How many tokens are predicted correctly, and their bits, for scores [samples, tokens, vocabulary].

    If tokens are bytes, the mean of the latter is bits per byte. The perplexity is 2 to the power of the mean.
    """
    scores = scores.detach().float()
    correct = (scores.argmax(-1) == target).float().sum(1)
    nats = cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").view_as(target).sum(1)
    return {"token_accuracy": float(correct.sum()), "bits_per_token": float(nats.sum()) / math.log(2)}


def segmentation_accuracy(scores: Tensor, target: Tensor, weights: Tensor | None = None) -> dict[str, float]:
    """Share of pixels classified correctly, and mean IoU: scores [samples, classes, ...], targets [samples, ...].

    The IoU of a sample is the mean over the classes that occur in its target or in its prediction.
    weights: how much each sample counts; by default 1.
    """
    predicted = scores.detach().argmax(1)
    correct = (predicted == target).float().flatten(1).sum(1) / scored_labels(target).clamp(min=1)
    scored = target != IGNORED_LABEL
    predicted_masks, target_masks = (
        pixel_masks(pixels, scored, scores.shape[1]) for pixels in (predicted, target)
    )
    intersection, union = (predicted_masks & target_masks).sum(1), (predicted_masks | target_masks).sum(1)
    iou = (intersection / union.clamp(min=1)).sum(1) / (union > 0).sum(1).clamp(min=1)
    weights = torch.ones_like(iou) if weights is None else weights
    return {"mean_iou": float((iou * weights).sum()), "pixel_accuracy": float((correct * weights).sum())}


def pixel_masks(labels: Tensor, scored: Tensor, classes: int) -> Tensor:
    """For each pixel and class 1 or 0, [samples, pixels, classes]; all 0 for a pixel that is not scored."""
    return one_hot(labels.where(scored, 0).flatten(1), classes) * scored.flatten(1).unsqueeze(2)


def absolute_error(output: Tensor, target: Tensor) -> dict[str, float]:
    """Absolute error, averaged over the numbers of a sample."""
    error = (output.detach().float() - target).abs()
    return {"mean_absolute_error": float(error.flatten(1).mean(1).sum() if error.ndim > 1 else error.sum())}


def check_shapes(loss: str, expected: str, output: Any, target: Tensor, *, fits: bool) -> None:
    """Raise unless output and target fit the loss, before torch fails or, worse, broadcasts."""
    if fits:
        return
    given, hint = f"type {type(output).__name__}", f"{_ONE_TENSOR}, or "
    if isinstance(output, Tensor):
        given = f"shape {list(output.shape)}"
        # A model that predicts tokens may compute other positions than the last one only if it receives targets.
        hint = hint if output.ndim == target.ndim + 1 == 3 else ""
    raise DataError(
        f"loss={loss}: expects {expected}, got an output of {given} and targets of shape {list(target.shape)}; {hint}"
        "choose another loss, see `gpipe ls losses`"
    )


def are_pixel_scores(output: Any, target: Tensor) -> bool:
    """Whether scores are [samples, classes, ...] and targets a class for each position, [samples, ...]."""
    return (
        isinstance(output, Tensor)
        and output.ndim == target.ndim + 1
        and output.shape[:1] + output.shape[2:] == target.shape
        and not target.is_floating_point()
    )
