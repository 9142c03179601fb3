"""loss=own: the loss that a model computes itself, from targets that it takes as an input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.measures import accuracy, main_scores, scored_labels, token_accuracy

MEANS = ("samples", "tokens", "shifted_tokens")


@final
@dataclass(frozen=True)
class OwnLoss:
    """The output has one number without dimensions, or a `loss`: the mean over the samples or tokens it was given."""

    targets: str | None = None
    mean: str | None = None

    def __post_init__(self) -> None:
        if self.mean not in (None, *MEANS):
            raise ConfigError(f"loss.mean={self.mean}: must be null or one of: {', '.join(MEANS)}")

    def model_input(self, input: Any, target: Tensor) -> Any:
        """The targets beside the inputs of the data."""
        if isinstance(input, dict):
            return {**input, self.targets or "labels": target}
        if self.targets is not None:
            raise ConfigError(
                f"loss.targets={self.targets}: is for data whose inputs are dicts; remove it, and the model gets the "
                "targets as its next argument"
            )
        return (*input, target) if isinstance(input, tuple) else (input, target)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        named = output.get("loss") if isinstance(output, Mapping) else None
        members = (
            output.values()
            if isinstance(output, Mapping)
            else output
            if isinstance(output, tuple | list)
            else [output]
        )
        numbers = [member for member in members if isinstance(member, Tensor) and member.dim() == 0]
        if isinstance(named, Tensor):
            numbers = [named]
        if len(numbers) != 1:
            raise ConfigError(
                f"loss=own: the model returns {len(numbers)} numbers, and one of them must be its loss; let it compute "
                "its loss from the targets that it gets after its inputs, or choose another loss"
            )
        return numbers[0]

    def row_weights(self, target: Tensor) -> Tensor:
        ones = torch.ones(len(target), dtype=torch.int64)
        if target.is_floating_point() or self.mean == "samples":
            return ones
        labels = target[:, 1:] if self.mean == "shifted_tokens" and target.ndim > 1 else target
        counts = scored_labels(labels)
        if self.mean is None and bool((counts != labels[0].numel()).any()):
            raise ConfigError(
                "loss.mean=null: some labels are ignored (-100), so micro-batches count by what the model's loss is a "
                f"mean of; give loss.mean, one of: {', '.join(MEANS)}"
            )
        return counts

    def measure(self, output: Any, target: Tensor) -> Mapping[str, float]:
        scores = main_scores(output)
        # Of tokens, only where the sums of the metric are over what the loss is a mean of.
        if not isinstance(scores, Tensor) or (target.ndim > 1 and self.mean in ("samples", "shifted_tokens")):
            return {}
        if target.ndim == 2 and scores.shape[:-1] == target.shape and not target.is_floating_point():
            return token_accuracy(scores, target)
        return accuracy(scores, target)
