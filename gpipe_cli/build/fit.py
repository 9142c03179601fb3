"""Whether data, model, loss and size of micro-batches fit each other, found out before the first step.

Two samples run through the model on the meta device, which takes little time and no memory. Where a layer of yours
cannot run there, the first step reports what does not fit. The engine of a language model runs a few inputs more, to
see whether scores for a token depend on tokens that they must not depend on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.build.layer_check import (
    LayerMisfit,
    check_first_layer,
    find_misfit,
    layer_that_rejects_one_row,
    meta_output,
    run_copy,
)
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.build.step import make_loss, metrics_of
from gpipe_cli.config.keys import list_options
from gpipe_cli.config.schema import ModelConfig, TrainConfig
from gpipe_cli.config.targets import current_name
from gpipe_cli.data.datasets import Data
from gpipe_cli.data.loading import replica_part
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.losses.blocks import blocked_linear
from gpipe_cli.losses.cross_entropy import TokenCrossEntropy
from gpipe_cli.losses.measures import Measure, main_scores, predicts_numbers
from gpipe_cli.losses.own import OwnLoss
from gpipe_cli.pipeline.microbatch import micro_batches
from gpipe_cli.profiling.records import has_values
from gpipe_cli.pytree import ModelInput, flatten, map_tensors
from gpipe_cli.runs.snapshots.manager import monitor_error
from gpipe_cli.sequential import original_output
from gpipe_cli.sequential.deferred import meta_like
from gpipe_cli.values import POSITIONS

_TOLERANCE = 1e-3
"""How far the sum of the probabilities in a row may be from 1."""
_SAME = 1e-3
"""The relative difference up to which scores count as the same: a model may group its tokens by their values."""
LEAST_ROWS = 2
"""Where one row is rejected."""


def check_task(settings: ModelConfig, loader: BatchLoader, model: nn.Sequential) -> None:
    """Raise ConfigError or DataError for data that does not fit the model or the loss."""
    if not settings.uses_loss:
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
    if isinstance(loss, OwnLoss):
        loss(output, target)  # raises ConfigError if the output has no loss
        loss.row_weights(target)
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
        blocked = blocked_linear(model)
        classes = scores.shape[-1 if isinstance(loss, TokenCrossEntropy) else 1]
        _check_class_count(loader, classes if blocked is None else blocked.out_features)
    if isinstance(settings, TrainConfig) and settings.snapshot.monitor not in (None, "loss"):
        _check_monitor(settings, metrics_of(loss), output, target)


def _check_monitor(settings: TrainConfig, measure: Measure, output: Any, target: Tensor) -> None:
    """Raise ConfigError for a metric that the loss does not measure; one that cannot measure zeros shows it later."""
    try:
        zeros = map_tensors(lambda tensor: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape), output)
        measured = {"loss", *measure(zeros, target)}
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - a loss of yours may reject what no model computes
        return
    if settings.snapshot.monitor not in measured:
        raise monitor_error(settings.snapshot.monitor, measured)


def _check_class_count(loader: BatchLoader, scores: int) -> None:
    if scores < loader.data.classes:
        raise DataError(
            f"model: has scores for {scores} classes, and the data has {loader.data.classes}; give the model at least "
            "as many"
        )


def _loss_name(target: str) -> str:
    """The loss as the command line names it."""
    names = (
        f"loss={option.name}" for option in list_options("loss") if option.target == current_name(target)
    )
    return next(names, f"loss._target_={target}")


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
        return original_output(model, meta_output(model, input))
    except LayerMisfit as misfit:
        if (
            find_misfit(meta_output, model, map_tensors(Tensor.float if has_tokens else _tokens, input))
            is None
        ):
            takes, has = ("numbers", "tokens") if has_tokens else ("tokens", "numbers")
            model_of_kind = "gpt" if has_tokens else "mlp"
            raise ConfigError(
                f"model: {misfit.layer} takes {takes}, and the data has {has}, which model={model_of_kind} takes; "
                "choose data and a model that fit each other"
            ) from misfit
        # A layer of ours is right, so the data is wrong; one of yours may be wrong itself, and the first step says how.
        if is_ours:
            hint = "" if has_tokens or first.dim() != 2 else "model=mlp takes rows of numbers; "
            raise ConfigError(
                f"model: {misfit}; {hint}choose data and a model that fit each other"
            ) from misfit
        try:  # with values, which a layer of yours may need
            output = run_copy(model, input) if has_values(model) else None
        except LayerMisfit:
            return None
        return None if output is None else original_output(model, map_tensors(meta_like, output))


def _tokens(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.int64)


def with_least_rows(settings: ModelConfig, loader: BatchLoader, model: nn.Sequential) -> BatchLoader:
    """The loader with the `least_rows` of the model; ConfigError if a mini-batch of the run has fewer."""
    if not settings.optimizer:  # nothing is trained
        return loader
    sizes = _mini_batch_sizes(settings, loader)
    parts = {
        size: {
            len(replica_part(list(range(size)), replica, loader.replicas))
            for replica in range(loader.replicas)
        }
        for size in sizes
    }
    rows = [part for own in parts.values() for part in own if part]
    if min(rows) >= LEAST_ROWS * settings.chunks:
        return loader
    layer = layer_that_rejects_one_row(model, loader.traced_batch())
    if layer is None:
        return loader
    for size, own in parts.items():
        if 1 in own:
            raise _refusal(loader, size, layer)
    notes = []
    for part in rows:
        count, least = (len(micro_batches(part, settings.chunks, least)) for least in (1, LEAST_ROWS))
        if count != least:
            notes.append(
                f"chunks={settings.chunks}: {layer} needs {LEAST_ROWS} samples in training, so a mini-batch of {part} "
                f"becomes {least} micro-batch{'es' if least > 1 else ''}, not {count}"
            )
    return replace(loader, least_rows=LEAST_ROWS, notes=(*loader.notes, *notes))


def _mini_batch_sizes(settings: ModelConfig, loader: BatchLoader) -> list[int]:
    """The different sizes of the mini-batches that the command trains on, the last one of an epoch included."""
    full = min(loader.batch_size, len(loader.data.train))
    last = len(loader.data.train) % loader.batch_size
    is_reached = (
        settings.trains
        and not loader.drop_last
        and (settings.steps is None or settings.steps >= loader.steps_per_epoch)
    )
    return [full, last] if last and last != full and is_reached else [full]


def _refusal(loader: BatchLoader, size: int, layer: str) -> ConfigError:
    samples = len(loader.data.train)
    is_last = size < loader.batch_size
    which = f"the last mini-batch of {samples} samples" if is_last else "a mini-batch"
    has = (
        f"has {size}"
        if loader.replicas == 1
        else f"leaves one of data_parallel={loader.replicas} replicas 1 of {size}"
    )
    hint = "set data.drop_last=true, or another batch_size" if is_last else "give a larger batch_size"
    if samples < loader.batch_size:
        hint = "give more samples"
    return ConfigError(
        f"batch_size={loader.batch_size}: {which} {has}, but {layer} needs at least {LEAST_ROWS} in training; {hint}"
    )


def scores_differ(engine: Engine, inputs: Iterable[ModelInput], place: int) -> bool:
    """Whether the scores of the token at `place` of the only sample are not the same for all inputs."""
    first: list[Tensor] = []

    def same_as_first(output: Any) -> Tensor:
        first.append(token_scores(output)[0, place])
        # Scores that are not finite are not judged here.
        differs = (first[-1] - first[0]).abs().max() > _SAME * first[0].abs().max()
        return (~differs).long()

    return not all(engine.predict(input, same_as_first) for input in inputs)


def token_scores(output: Any) -> Tensor:
    scores = main_scores(output)
    if not isinstance(scores, Tensor) or scores.ndim != 3:
        shape = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ConfigError(
            f"model: returns {shape}; a language model returns scores [samples, tokens, vocabulary]"
        )
    return scores


def check_isolation(engine: Engine, data: Data) -> None:
    """Refuse a model that lets packed documents see each other although positions say where each begins."""
    input, _ = data.train[0]
    if not isinstance(input, dict) or POSITIONS not in input or len(input[POSITIONS]) < 2:
        return
    length = len(input[POSITIONS])
    half = length // 2
    places = torch.arange(length)
    second = torch.zeros(length, dtype=torch.int64)
    packs = [
        {
            "input_ids": torch.where(places < half, token, second)[None],
            POSITIONS: (places - half * (places >= half))[None],
        }
        for token in (0, 1)
    ]
    if scores_differ(engine, packs, -1):
        raise ConfigError(
            "data.pack=true: this model lets a document see the one before it in the same sample, although positions "
            "begin again; give data.pack=false, or data.pack=joined if that is what you want"
        )
