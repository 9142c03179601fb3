"""Order is a pure function of (seed, epoch), augmentation of (seed, epoch, sample); workers change no bit."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterable

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpipe_cli.data import transforms
from gpipe_cli.data.datasets import Data
from gpipe_cli.data.generated import build_synthetic
from gpipe_cli.data.images import build_digits
from gpipe_cli.data.loading import (
    batch_count,
    batches,
    check_batch,
    check_labels,
    epoch_order,
    replica_part,
)
from gpipe_cli.errors import DataError

# torch warns if there are more workers than cores, which depends on the machine.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Counting:
    """Samples that are their own index, loaded one by one, and remember which were requested."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.requested: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.requested.append(index)
        return torch.full((1, 2, 2), float(index)), index


def indices_of(loaded: Iterable[tuple[Tensor, Tensor]]) -> list[list[int]]:
    return [target.tolist() for _, target in loaded]


def assert_equal_batches(
    left: Iterable[tuple[Tensor, Tensor]], right: Iterable[tuple[Tensor, Tensor]]
) -> None:
    for (input, target), (other_input, other_target) in zip(left, right, strict=True):
        assert torch.equal(input, other_input) and torch.equal(target, other_target)


@settings(max_examples=80)
@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    start=st.integers(0, 8),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_starting_in_the_middle_of_an_epoch_loads_only_the_rest(
    length: int, batch_size: int, start: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    if drop_last and length < batch_size:
        return
    keys = {"batch_size": batch_size, "seed": 3, "epoch": epoch, "shuffle": shuffle, "drop_last": drop_last}
    whole = indices_of(batches(Counting(length), **keys))
    samples = Counting(length)
    rest = indices_of(batches(samples, start=start, **keys))
    assert rest == whole[start:]
    assert samples.requested == [index for batch in rest for index in batch]
    assert len(whole) == batch_count(length, batch_size, drop_last=drop_last)
    loaded = [index for batch in whole for index in batch]
    assert len(set(loaded)) == len(loaded)
    assert len(loaded) == (length // batch_size * batch_size if drop_last else length)
    if not shuffle:
        assert loaded == list(range(len(loaded)))


def test_the_order_changes_with_seed_and_epoch_and_with_nothing_else() -> None:
    orders = {
        (seed, epoch): list(epoch_order(50, seed=seed, epoch=epoch, shuffle=True))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len({tuple(order) for order in orders.values()}) == 16
    torch.manual_seed(99)
    assert orders[2, 3] == list(epoch_order(50, seed=2, epoch=3, shuffle=True))


def test_the_order_is_the_same_in_every_version_of_gpipe() -> None:
    """A stored order: if it changes, runs can no longer be resumed in the middle of an epoch."""
    assert list(epoch_order(10, seed=0, epoch=0, shuffle=True)) == [5, 1, 0, 6, 3, 9, 7, 2, 8, 4]


@pytest.mark.parametrize("kind", ["none", "basic", "augment"])
def test_samples_in_memory_and_one_by_one_give_the_same_bits(kind: str) -> None:
    data = build_synthetic(shape=[3, 6, 6], length=20)
    transform = getattr(transforms, kind)(data).train

    class OneByOne:
        def __len__(self) -> int:
            return len(data.train)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor | int]:
            return data.train[index]

    keys = {"batch_size": 8, "seed": 1, "epoch": 2, "shuffle": True, "transform": transform}
    assert_equal_batches(batches(data.train, **keys), batches(OneByOne(), **keys))


def test_an_augmented_sample_depends_on_epoch_and_index_not_on_its_batch() -> None:
    data = build_synthetic(shape=[3, 6, 6], length=12)
    transform = transforms.augment(data).train

    def by_index(epoch: int, batch_size: int, shuffle: bool) -> dict[float, Tensor]:
        order = epoch_order(12, seed=5, epoch=epoch, shuffle=shuffle)
        loaded = batches(
            data.train, batch_size=batch_size, seed=5, epoch=epoch, shuffle=shuffle, transform=transform
        )
        return dict(zip(order, torch.cat([input for input, _ in loaded]), strict=True))

    first, again, later = by_index(0, 4, True), by_index(0, 5, False), by_index(1, 4, True)
    assert all(torch.equal(first[index], again[index]) for index in range(12))
    assert not all(torch.equal(first[index], later[index]) for index in range(12))


@pytest.mark.parametrize("workers", [0, 2])
def test_no_global_generator_advances(workers: int) -> None:
    data = build_synthetic(shape=[3, 6, 6], length=12)
    transform = transforms.augment(data).train
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    list(
        batches(data.train, batch_size=4, seed=0, epoch=0, shuffle=True, workers=workers, transform=transform)
    )
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy.random.get_state()[1].tolist() == states[2]


@pytest.mark.parametrize(
    ("data", "workers"), [(build_synthetic(shape=[3, 6, 6], length=30), 1), (build_digits(), 3)]
)
def test_workers_give_the_same_bits_as_none(data: Data, workers: int) -> None:
    keys = {"batch_size": 4, "seed": 0, "epoch": 3, "shuffle": True, "start": len(data.train) // 4 - 5}
    transform = transforms.augment(data).train
    assert_equal_batches(
        batches(data.train, workers=workers, transform=transform, **keys),
        batches(data.train, transform=transform, **keys),
    )
    assert not multiprocessing.active_children()


def test_closing_or_dropping_the_generator_stops_its_workers() -> None:
    keys = {"batch_size": 1, "seed": 0, "epoch": 0, "shuffle": False, "workers": 2}
    closed = batches(Counting(50), **keys)
    next(closed)
    assert len(multiprocessing.active_children()) == 2
    closed.close()
    assert not multiprocessing.active_children()

    dropped = batches(Counting(50), **keys)
    next(dropped)
    del dropped
    gc.collect()
    assert not multiprocessing.active_children()


class Broken(Counting):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 3:
            raise ValueError("broken")
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 9:
            time.sleep(1000)
        return super().__getitem__(index)


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_sample_is_named_by_its_index(workers: int, pin_memory: bool) -> None:
    loaded = batches(
        Broken(5), batch_size=2, seed=0, epoch=0, shuffle=False, workers=workers, pin_memory=pin_memory
    )
    next(loaded)
    with pytest.raises(DataError, match="sample 3") as caught:
        next(loaded)
    assert str(caught.value) == "sample 3: ValueError: broken"
    if workers:
        assert "in __getitem__" in str(caught.value.__cause__), "the worker's traceback is preserved"
    assert not multiprocessing.active_children()


def assert_worker_failure(index: int, message: str, pin_memory: bool) -> None:
    keys = {"batch_size": 1, "seed": 0, "epoch": 0, "shuffle": False, "timeout": 1}
    loaded = batches(Broken(10), workers=1, start=index, pin_memory=pin_memory, **keys)
    with pytest.raises(DataError, match=f"loading data in workers failed: .*({message})") as caught:
        next(loaded)
    assert "\n" not in str(caught.value)
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_worker_that_is_killed_is_an_error_at_once(pin_memory: bool) -> None:
    assert_worker_failure(7, "killed by signal|exited unexpectedly", pin_memory)


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_worker_that_hangs_is_an_error_after_the_timeout(pin_memory: bool) -> None:
    assert_worker_failure(9, "no mini-batch for data.timeout=1 seconds", pin_memory)


def test_too_little_data_is_an_error_at_once() -> None:
    with pytest.raises(
        DataError, match="0 samples make no batch of 4: give more data or a smaller batch_size"
    ):
        batches(Counting(0), batch_size=4, seed=0, epoch=0, shuffle=False)
    with pytest.raises(DataError, match="3 samples make no batch of 4"):
        batches(Counting(3), batch_size=4, seed=0, epoch=0, shuffle=False, drop_last=True)


@given(st.lists(st.integers(), max_size=20), st.integers(1, 8))
def test_the_parts_of_all_replicas_are_the_batch_and_differ_by_one_sample_at_most(
    indices: list[int], replicas: int
) -> None:
    parts = [replica_part(indices, replica, replicas) for replica in range(replicas)]
    assert [index for part in parts for index in part] == indices
    assert {len(part) for part in parts} <= {len(indices) // replicas, len(indices) // replicas + 1}
    assert [len(part) for part in parts] == sorted((len(part) for part in parts), reverse=True)


@pytest.mark.parametrize("label", [10, -1, 255, -99])
def test_a_label_out_of_range_is_named_with_the_number_of_classes(label: int) -> None:
    with pytest.raises(DataError, match=f"label {label} is out of range: the model has 10 classes, 0 to 9"):
        check_labels(torch.tensor([3, label, -100]), classes=10)


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([[0, 9], [5, -100]]),
        torch.tensor([-100, -100]),
        torch.tensor([], dtype=torch.long),
        torch.tensor([1, 0], dtype=torch.uint8),
        torch.tensor([True, False]),
    ],
)
def test_labels_of_the_classes_and_ignored_ones_pass(labels: Tensor) -> None:
    check_labels(labels, classes=10)


def test_every_argument_of_a_batch_needs_as_many_rows_as_there_are_targets() -> None:
    for input in (torch.zeros(4, 2), {"a": torch.zeros(4, 2), "b": torch.zeros(4)}):
        check_batch(input, torch.zeros(4))
    with pytest.raises(DataError, match="a batch has 4 inputs but 3 targets"):
        check_batch(torch.zeros(4, 2), torch.zeros(3))
    with pytest.raises(DataError, match="a batch has 3 inputs but 4 targets"):
        check_batch({"a": torch.zeros(4, 2), "b": torch.zeros(3)}, torch.zeros(4))
    with pytest.raises(DataError, match="a batch has an input without dimensions but 4 targets"):
        check_batch((torch.zeros(4, 2), torch.zeros(())), torch.zeros(4))
