"""A part of the training samples, held out to evaluate on while a model trains.

Which samples it holds depends on the seed alone, so every rank, engine and resumed run holds out the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor

from gpipe_cli.data.datasets import BatchedSamples, Data, Samples, generator_for
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.pytree import ModelInput

DEFAULT_FRACTION = 0.1
"""Of the training samples, where the data has nothing else to evaluate on."""


@runtime_checkable
class MeasuredSamples(Protocol):
    """Samples whose inputs are normalized by statistics, which must be those of the samples that are trained on."""

    def mean_and_std(self, indices: Tensor, /) -> tuple[tuple[float, ...], tuple[float, ...]]: ...


@final
@dataclass(frozen=True)
class SplitData:
    data: Data
    validation: Samples | None
    """The part that is held out; None if there is none."""
    note: str | None


def hold_out(data: Data, fraction: float | None, seed: int) -> SplitData:
    """Divide the training samples, if `fraction` says so or the data has no test set.

    The held-out part is the test set of data without one. Otherwise training evaluates on it, and leaves the test set
    to `gpipe eval`.
    """
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError(
            f"data.validation={fraction}: must be between 0 and 1, or null; 0.1 holds out a tenth of the samples"
        )
    if fraction is None and data.test is not None:
        return SplitData(_measured(data, torch.arange(len(data.train))), None, None)
    fraction = DEFAULT_FRACTION if fraction is None else fraction
    length = len(data.train)
    if length < 2:
        raise DataError(f"data.validation={fraction}: a single sample cannot be divided; give at least 2")
    count = min(max(round(length * fraction), 1), length - 1)
    order = torch.randperm(length, generator=generator_for(seed, "validation"))
    # The longest sample stays: the model is traced, and its memory estimated, with it.
    order = torch.cat([order[order != data.longest], torch.tensor([data.longest])])
    held_out, kept = (part.sort().values for part in (order[:count], order[count:]))
    validation = subset(data.train, held_out)
    data = _measured(data, kept)
    note = (
        f"data.validation={fraction}: holding out {count} of {length} training samples, chosen by seed={seed}"
    )
    if data.tokenizer is not None:
        note += "; its windows of text may overlap with others, those that data.held_out holds out do not"
    divided = replace(
        data,
        train=subset(data.train, kept),
        test=validation if data.test is None else data.test,
        longest=int(torch.searchsorted(kept, data.longest)),
    )
    return SplitData(divided, validation, note)


def _measured(data: Data, kept: Tensor) -> Data:
    if not isinstance(data.train, MeasuredSamples):
        return data
    mean, std = data.train.mean_and_std(kept)
    return replace(data, mean=mean, std=std)


def subset(samples: Samples, indices: Tensor) -> Samples:
    """The samples with these indices, which load batches at once if the samples do."""
    return (
        _BatchedSubset(samples, indices) if isinstance(samples, BatchedSamples) else _Subset(samples, indices)
    )


@final
class _Subset:
    def __init__(self, samples: Samples, indices: Tensor) -> None:
        self._samples, self._indices = samples, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[ModelInput, Tensor | int]:
        return self._samples[int(self._indices[index])]


@final
class _BatchedSubset:
    def __init__(self, samples: BatchedSamples, indices: Tensor) -> None:
        self._samples, self._indices = samples, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[ModelInput, Tensor | int]:
        return self._samples[int(self._indices[index])]

    def batch(self, indices: Tensor) -> tuple[ModelInput, Tensor]:
        return self._samples.batch(self._indices[indices])
