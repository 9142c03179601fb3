"""Batches of one epoch: which samples, in which order, with which random transforms.

The order is a pure function of (seed, epoch), a random transform of (seed, epoch, sample). So a run can enter an epoch
at any batch, with any number of workers, and get the same bits, and a snapshot need not save anything about it.
torch's default generator never advances.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import BatchedSamples, Samples, generator_for
from gpipe_cli.data.transforms import Transform
from gpipe_cli.data.worker_processes import Batch, load_in_workers, pinned
from gpipe_cli.errors import DataError
from gpipe_cli.pytree import ModelInput, Template, flatten, map_tensors, unflatten
from gpipe_cli.values import IGNORED_LABEL

_SAME_SIZE = "set data.size to scale all images to the same size"
_SAME_LENGTH = "pad the samples to one length, or give the dataset a method batch(indices) that pads a batch"


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
    pin_memory: bool = False,
) -> Generator[Batch, None, None]:
    """Yield the epoch's batches from number `start` on, without loading those before it.

    timeout: seconds that a worker may take for a batch.
    replica: the index of this replica; each of the `replicas` reads its own part of every batch.
    pin_memory: put batches where an accelerator can read them while the host does something else.

    Close the generator, or drop it, to stop its workers early.
    """
    assert batch_size > 0 and start >= 0 and workers >= 0
    length = len(samples)
    count = batch_count(length, batch_size, drop_last=drop_last)
    if not count:
        raise DataError(
            f"{length} samples make no batch of {batch_size}: give more data or a smaller batch_size"
        )
    order = epoch_order(length, seed=seed, epoch=epoch, shuffle=shuffle)
    requests = _Requests(order, epoch, batch_size, range(start, count), replica, replicas)
    fetch = BatchFetcher(samples, transform, seed)
    if workers and len(requests):
        return load_in_workers(fetch, requests, workers, timeout, pin_memory=pin_memory)
    return (pinned(fetch(request)) if pin_memory else fetch(request) for request in requests)


def replica_part(indices: list[int], replica: int, replicas: int) -> list[int]:
    """Return the samples of a batch that a replica reads: consecutive ones, as many as the others, or one more.

    The parts of all replicas in order are the batch. If a batch has fewer samples than there are replicas, the last
    replicas have none.
    """
    small, larger = divmod(len(indices), replicas)
    begin = replica * small + min(replica, larger)
    return indices[begin : begin + small + (replica < larger)]


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
    """Return the indices of all samples in the order of this epoch, in eight bytes each."""
    if not shuffle:
        return range(length)
    return torch.randperm(length, generator=generator_for(seed, "order", epoch)).numpy().data


def check_batch(input: ModelInput, target: Tensor) -> None:
    for tensor in flatten(input, "input")[0]:
        if tensor.shape[:1] != target.shape[:1]:
            inputs = f"{len(tensor)} inputs" if tensor.dim() else "an input without dimensions"
            raise DataError(f"a batch has {inputs} but {len(target)} targets")


def check_labels(target: Tensor, classes: int) -> None:
    """Check that labels are from 0 to classes - 1: on some devices cross_entropy reads foreign memory otherwise."""
    labels = target[target != IGNORED_LABEL] if target.dtype.is_signed else target
    if not labels.numel():
        return
    low, high = (int(bound) for bound in labels.aminmax())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise DataError(f"label {wrong} is out of range: the model has {classes} classes, 0 to {classes - 1}")


@final
@dataclass(frozen=True)
class BatchRequest:
    """A batch to load. It carries the epoch, so that the fetcher needs no state."""

    epoch: int
    indices: list[int]
    without_rows: bool = False
    """Return an empty batch of the right shape."""


@final
@dataclass(frozen=True)
class _Requests:
    """The batches to load, made when they are needed: a large data set has millions."""

    order: Sequence[int]
    epoch: int
    batch_size: int
    numbers: range
    replica: int
    replicas: int

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[BatchRequest]:
        for number in self.numbers:
            indices = list(self.order[number * self.batch_size : (number + 1) * self.batch_size])
            own = replica_part(indices, self.replica, self.replicas)
            # An empty batch still has a shape, which only a sample can tell.
            yield BatchRequest(self.epoch, own or indices[:1], without_rows=not own)


@final
class BatchFetcher:
    """Fetches the batch of a request. It has no state, so that any worker process can fetch any batch."""

    def __init__(self, samples: Samples, transform: Transform | None, seed: int) -> None:
        self._samples, self._transform, self._seed = samples, transform, seed

    def __call__(self, request: BatchRequest) -> Batch:
        if isinstance(self._samples, BatchedSamples):
            input, target = self._fetch_together(self._samples, request)
        else:
            input, target = self._fetch_one_by_one(request)
        if request.without_rows:
            return map_tensors(lambda tensor: tensor[:0], input), target[:0]
        return input, target

    def _fetch_together(self, samples: BatchedSamples, request: BatchRequest) -> Batch:
        with _errors_name(f"samples {request.indices[0]}, ..."):
            inputs, targets = samples.batch(torch.tensor(request.indices))
            if self._transform is None:
                return inputs, targets
            if not self._transform.random:
                return self._transform(inputs, None), targets
        rows = _Rows()
        for row, index in enumerate(request.indices):
            with _errors_name(f"sample {index}"):
                rows.add(index, self._transformed(_row(inputs, row), request.epoch, index))
        return rows.stacked(), targets

    def _fetch_one_by_one(self, request: BatchRequest) -> Batch:
        inputs, targets = _Rows(), _Rows()
        for index in request.indices:
            with _errors_name(f"sample {index}"):
                input, target = self._samples[index]
                inputs.add(index, self._transformed(input, request.epoch, index))
                targets.add(index, torch.as_tensor(target))
        return inputs.stacked(), targets.stacked()

    def _transformed(self, input: ModelInput, epoch: int, index: int) -> ModelInput:
        if self._transform is None:
            return input
        is_random = self._transform.random
        return self._transform(
            input, generator_for(self._seed, "transform", epoch, index) if is_random else None
        )


def _row(inputs: ModelInput, row: int) -> ModelInput:
    input: ModelInput = map_tensors(lambda tensor: tensor[row], inputs)
    return input


@final
class _Rows:
    """Inputs or targets of samples that become one batch."""

    def __init__(self) -> None:
        self._first = 0
        self._template: Template | None = None
        self._rows: list[tuple[Tensor, ...]] = []

    def add(self, index: int, value: ModelInput) -> None:
        """Add the value of a sample; raise DataError unless it is like that of the first one."""
        tensors, template = flatten(value, "input")
        if not self._rows:
            self._first, self._template = index, template
        elif template != self._template:
            raise DataError(
                f"differs from sample {self._first} of the same batch in the names or number of its tensors, or in a "
                "value that is not a tensor; all samples must have the same"
            )
        for tensor, first in zip(tensors, self._rows[0] if self._rows else tensors, strict=True):
            if tensor.shape != first.shape:
                raise DataError(
                    f"has the shape {list(tensor.shape)}, but sample {self._first} of the same batch has "
                    f"{list(first.shape)}; {_SAME_SIZE if tensor.dim() == 3 else _SAME_LENGTH}"
                )
        self._rows.append(tensors)

    def stacked(self) -> Any:
        assert self._template is not None, "a batch has samples"
        return unflatten(self._template, [torch.stack(column) for column in zip(*self._rows, strict=True)])


@contextmanager
def _errors_name(samples: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"{samples}: {error}") from error
    except Exception as error:  # a user's dataset may raise anything; say which sample it was
        raise DataError(f"{samples}: {type(error).__name__}: {error}") from error
