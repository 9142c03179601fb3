"""What is counted besides the loss, for each kind of task, as sums over samples.

All are sums of one number per sample, so they too do not depend on how samples were divided into batches.
Which of them fits is the loss's matter.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot


def accuracy(output: Any, target: Tensor) -> dict[str, float]:
    """How many samples have their class as the first, or among the first five, of the scores.

    Nothing is counted where the target is no class per sample (a regression, say).
    """
    if not isinstance(output, Tensor) or output.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        return {}
    best = output.detach().topk(min(5, output.shape[1]), dim=1).indices
    right = best == target.unsqueeze(1)
    return {"top1": float(right[:, :1].sum()), "top5": float(right.sum())}


def token_accuracy(scores: Tensor, target: Tensor) -> dict[str, float]:
    """Tokens guessed right, and the bits a perfect code would spend on one: [samples, tokens, vocabulary].

    Where tokens are bytes the latter is bits per byte. The perplexity is 2 to its power.
    """
    scores = scores.detach().float()
    right = (scores.argmax(-1) == target).float().mean(1)
    nats = cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").view_as(target).mean(1)
    return {"token_accuracy": float(right.sum()), "bits_per_token": float(nats.sum()) / math.log(2)}


def segmentation_accuracy(scores: Tensor, target: Tensor) -> dict[str, float]:
    """Pixels classified right, and overlap by area: scores [samples, classes, ...], targets [samples, ...].

    The overlap of a sample is the mean, over the classes that are in it or were seen in it, of intersection
    over union.
    """
    classes = scores.shape[1]
    guessed = scores.detach().argmax(1)
    right = (guessed == target).float().flatten(1).mean(1)
    here, there = (one_hot(one.flatten(1), classes) for one in (guessed, target))
    intersection, union = (here & there).sum(1), (here | there).sum(1)
    overlap = (intersection / union.clamp(min=1)).sum(1) / (union > 0).sum(1)
    return {"mean_iou": float(overlap.sum()), "pixel_accuracy": float(right.sum())}


def absolute_error(output: Tensor, target: Tensor) -> dict[str, float]:
    """How far numbers are from their targets, on average over those of a sample."""
    error = (output.detach().float() - target).abs()
    return {"mean_absolute_error": float(error.flatten(1).mean(1).sum() if error.ndim > 1 else error.sum())}
