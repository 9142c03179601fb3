"""Runs a language model on a few inputs to see whether its scores for a token depend on tokens that they must not
depend on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.measures import scores_of
from gpipe_cli.pytree import ModelInput
from gpipe_cli.values import POSITIONS

_SAME = 1e-3
"""The relative difference up to which scores count as the same: a model may group its tokens by their values."""


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
    scores = scores_of(output)
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
