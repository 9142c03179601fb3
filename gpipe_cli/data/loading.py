"""Batches of one epoch: which samples, in which order, changed how.

The order is a pure function of (seed, epoch), a random transform of (seed, epoch, sample). So an epoch can be
entered at any batch, by any number of workers, with the same bits, and nothing has to be saved. torch's
default generator never moves. The file knows nothing of models, losses or steps.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import BatchedSamples, Samples
from gpipe_cli.data.seeds import generator_for
from gpipe_cli.data.transforms import Transform
from gpipe_cli.data.workers import Batch, fetched_by_workers
from gpipe_cli.errors import DataError


def batch_count(length: int, batch_size: int, *, drop_last: bool = False) -> int:
    """How many batches an epoch has."""
    return length // batch_size if drop_last else -(-length // batch_size)


def batches(
    samples: Samples,
    *,
    batch_size: int,
    seed: int,
    epoch: int,
    start: int = 0,
    shuffle: bool,
    workers: int = 0,
    transform: Transform | None = None,
    drop_last: bool = False,
    timeout: float | None = None,
    replica: int = 0,
    replicas: int = 1,
) -> Generator[Batch, None, None]:
    """The epoch's batches from number `start` on; those before it are skipped without loading them.

    Close the generator, or drop it, to end its workers early. timeout: seconds a worker may take for a batch.
    replica: of how many, each of which reads its part of every batch.
    """
    assert batch_size > 0 and start >= 0 and workers >= 0
    length = len(samples)
    count = batch_count(length, batch_size, drop_last=drop_last)
    if not count:
        raise DataError(
            f"{length} samples make no batch of {batch_size}: give more data or a smaller batch_size"
        )
    order = epoch_order(length, seed=seed, epoch=epoch, shuffle=shuffle)
    wanted = [
        _part(Wanted(epoch, order[number * batch_size : (number + 1) * batch_size]), replica, replicas)
        for number in range(start, count)
    ]
    fetch = Fetch(samples, transform, seed)
    if workers and wanted:
        return fetched_by_workers(fetch, wanted, workers, timeout)
    return (fetch(item) for item in wanted)


def replica_part(indices: list[int], replica: int, replicas: int) -> list[int]:
    """The samples of a batch that one of the replicas reads: consecutive ones, as many as the others, or one more.

    So the parts of all replicas one after another are the batch. In one with fewer samples than replicas the last
    of them have none.
    """
    small, larger = divmod(len(indices), replicas)
    begin = replica * small + min(replica, larger)
    return indices[begin : begin + small + (replica < larger)]


def _part(whole: Wanted, replica: int, replicas: int) -> Wanted:
    own = replica_part(whole.indices, replica, replicas)
    # A batch of no samples still has a shape, which only a sample can tell.
    return Wanted(whole.epoch, own) if own else Wanted(whole.epoch, whole.indices[:1], only_its_shape=True)


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The indices of all samples in the order of this epoch."""
    if not shuffle:
        return list(range(length))
    order: list[int] = torch.randperm(length, generator=generator_for(seed, "order", epoch)).tolist()
    return order


@final
@dataclass(frozen=True)
class Wanted:
    """One batch to fetch. It carries the epoch, so that whoever fetches needs no state."""

    epoch: int
    indices: list[int]
    only_its_shape: bool = False
    """Give a batch without rows."""


@final
class Fetch:
    """Turns what is wanted into a batch; it remembers nothing, so any process can do it."""

    def __init__(self, samples: Samples, transform: Transform | None, seed: int) -> None:
        self._samples, self._transform, self._seed = samples, transform, seed
        self._batched = samples if isinstance(samples, BatchedSamples) else None

    def __call__(self, wanted: Wanted) -> Batch:
        input, target = (
            self._one_by_one(wanted) if self._batched is None else self._together(self._batched, wanted)
        )
        return (input[:0], target[:0]) if wanted.only_its_shape else (input, target)

    def _together(self, samples: BatchedSamples, wanted: Wanted) -> Batch:
        with _naming(f"samples {wanted.indices[0]}, ..."):
            inputs, targets = samples.batch(torch.tensor(wanted.indices))
            if self._transform is None:
                return inputs, targets
            if not self._transform.random:
                return self._transform(inputs, None), targets
        changed = []
        for input, index in zip(inputs, wanted.indices, strict=True):
            with _naming(f"sample {index}"):
                changed.append(self._changed(input, wanted.epoch, index))
        return torch.stack(changed), targets

    def _one_by_one(self, wanted: Wanted) -> Batch:
        inputs, targets = [], []
        for index in wanted.indices:
            with _naming(f"sample {index}"):
                input, target = self._samples[index]
                inputs.append(self._changed(input, wanted.epoch, index))
                targets.append(torch.as_tensor(target))
                _check_alike(inputs, wanted.indices)
        return torch.stack(inputs), torch.stack(targets)

    def _changed(self, input: Tensor, epoch: int, index: int) -> Tensor:
        if self._transform is None:
            return input
        chance = generator_for(self._seed, "transform", epoch, index) if self._transform.random else None
        return self._transform(input, chance)


def _check_alike(inputs: list[Tensor], indices: list[int]) -> None:
    first, last = inputs[0].shape, inputs[-1].shape
    if first != last:
        raise DataError(
            f"has the shape {list(last)}, and sample {indices[0]} of the same batch {list(first)}; "
            "set data.size to make images alike"
        )


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"{what}: {error}") from error
    except Exception as error:  # a dataset may be anybody's code; which sample broke it is what helps
        raise DataError(f"{what}: {type(error).__name__}: {error}") from error
