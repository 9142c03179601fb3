"""Whether data, model and loss fit each other, found out before the first step.

Two samples run through the model on the meta device, which takes little time and no memory. Where a layer of yours
cannot run there, the first step reports what does not fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.config.schema import CostConfig, EvalConfig, ModelConfig
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.losses.measures import main_scores, predicts_numbers
from gpipe_cli.losses.token_cross_entropy import TokenCrossEntropy
from gpipe_cli.pipeline.layer_check import LayerMisfit, check_first_layer, output_without_storage, run_copy
from gpipe_cli.profiling.layers import has_values
from gpipe_cli.pytree import ModelInput, flatten, map_tensors
from gpipe_cli.run.data import BatchLoader
from gpipe_cli.run.training_step import make_loss
from gpipe_cli.sequential import original_output
from gpipe_cli.sequential.without_storage import meta_like

_TOLERANCE = 1e-3
"""Of the sum of probabilities."""


def check_task(settings: ModelConfig, loader: BatchLoader, model: nn.Sequential) -> None:
    """Raise ConfigError or DataError for data that does not fit the model or the loss."""
    if not isinstance(settings, CostConfig | EvalConfig):
        return
    input, target = loader.traced_samples()
    loss = make_loss(settings)
    name = _loss_name(str(settings.loss["_target_"]))
    numbers = predicts_numbers(loss)
    if numbers is False:
        _check_classes(loader, name, target)
    output = _output(settings, model, input)
    if output is None:
        return
    scores = main_scores(output)
    if not isinstance(scores, Tensor):
        return
    if numbers is True and scores.shape != target.shape:
        raise DataError(
            f"{name}: expects numbers and targets of the same shape, got an output of shape {list(scores.shape)} and "
            f"targets of shape {list(target.shape)}; choose another loss, see `gpipe ls losses`"
        )
    if numbers is False:
        if type(loss).__module__.startswith("gpipe_cli."):
            loss(output, map_tensors(meta_like, target))  # raises DataError if the shapes do not fit
        _check_class_count(loader, scores.shape[-1 if isinstance(loss, TokenCrossEntropy) else 1])


def _check_class_count(loader: BatchLoader, scores: int) -> None:
    if scores < loader.data.classes:
        raise DataError(
            f"model: has scores for {scores} classes, and the data has {loader.data.classes}; give the model at least "
            "as many"
        )


def _loss_name(target: str) -> str:
    return f"loss={target.split('.')[-2]}" if target.startswith("gpipe_cli.") else f"loss._target_={target}"


def _check_classes(loader: BatchLoader, loss: str, target: Tensor) -> None:
    """Raise DataError unless targets are classes, or probabilities of classes."""
    if target.is_floating_point() and not _are_probabilities(target):
        example = float(target.flatten()[0])
        raise DataError(
            f"{loss}: takes classes, or probabilities that add up to 1, and the targets are numbers such as "
            f"{example:.4g}; choose loss=mse to predict numbers"
        )
    if loader.data.classes == 1:
        raise DataError(f"{loss}: the data has one class, so there is nothing to learn; give it at least 2")


def _are_probabilities(target: Tensor) -> bool:
    if target.dim() < 2 or target.shape[1] < 2 or bool((target < 0).any()):
        return False
    return bool((target.sum(1) - 1).abs().max() < _TOLERANCE)


def _output(settings: ModelConfig, model: nn.Sequential, input: ModelInput) -> Any:
    """The output of the model without values; None if it cannot be determined."""
    first, *_ = flatten(input, "input")[0]
    has_tokens = not first.is_floating_point()
    is_ours = str(settings.model["_target_"]).startswith("gpipe_cli.")
    try:
        if has_tokens or is_ours:
            check_first_layer(model, input)
        return original_output(model, output_without_storage(model, input))
    except LayerMisfit as misfit:
        if _accepts(model, map_tensors(_numbers if has_tokens else _tokens, input)):
            takes, has = ("numbers", "tokens") if has_tokens else ("tokens", "numbers")
            model_of_kind = "gpt" if has_tokens else "mlp"
            raise ConfigError(
                f"model: {misfit.layer} takes {takes}, and the data has {has}, which model={model_of_kind} takes; "
                "choose data and a model that fit each other"
            ) from misfit
        # A layer of ours is right, so the data is wrong; one of yours may be wrong itself, and the first step says how.
        if is_ours:
            cure = "" if has_tokens or first.dim() != 2 else "model=mlp takes rows of numbers; "
            raise ConfigError(
                f"model: {misfit}; {cure}choose data and a model that fit each other"
            ) from misfit
        try:  # with values, which a layer of yours may need
            output = run_copy(model, input) if has_values(model) else None
        except LayerMisfit:
            return None
        return None if output is None else original_output(model, map_tensors(meta_like, output))


def _accepts(model: nn.Sequential, input: ModelInput) -> bool:
    try:
        output_without_storage(model, input)
    except LayerMisfit:
        return False
    return True


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.float()


def _tokens(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.int64)
