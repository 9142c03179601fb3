"""The part of the training samples that is held out: chosen by the seed alone, and never trained on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpipe_cli.data.datasets import (
    BatchedSamples,
    Data,
    Samples,
    SplitData,
    class_labels,
    generator_for,
    hold_out,
)
from gpipe_cli.errors import ConfigError, DataError


class Numbers:
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(index)), index


class Batches(Numbers):
    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return indices.float().unsqueeze(1).expand(-1, 2), indices


def data(samples: Samples, test: Samples | None = None) -> Data:
    return Data(samples, test, classes=30, shape=(2,), longest=7)


def targets(samples: Samples | None) -> list[int]:
    assert samples is not None
    return [int(samples[index][1]) for index in range(len(samples))]


def test_the_seed_alone_decides_and_no_sample_is_lost() -> None:
    divided = hold_out(data(Numbers(30)), 0.2, seed=3).data
    train, test = targets(divided.train), targets(divided.test)
    assert sorted(train + test) == list(range(30)) and len(test) == 6
    assert train == sorted(train) and test == sorted(test)
    again = hold_out(data(Batches(30)), 0.2, seed=3).data
    assert isinstance(again.train, BatchedSamples) and targets(again.train) == train
    assert again.train.batch(torch.tensor([4, 0]))[1].tolist() == [train[4], train[0]]
    assert targets(hold_out(data(Numbers(30)), 0.2, seed=4).data.test) != test


def test_the_longest_sample_stays_where_the_model_is_traced_with_it() -> None:
    for seed in range(20):
        divided = hold_out(data(Numbers(9)), 0.8, seed).data
        assert targets(divided.train)[divided.longest] == 7 and len(divided.train) == 2


def test_data_without_a_test_set_is_divided_and_data_with_one_is_not() -> None:
    divided = hold_out(data(Numbers(30)), None, seed=0)
    assert len(targets(divided.data.test)) == 3 and divided.validation is divided.data.test
    assert divided.note == "data.validation=0.1: holding out 3 of 30 training samples, chosen by seed=0"
    whole = data(Numbers(30), Numbers(4))
    assert hold_out(whole, None, seed=0) == SplitData(whole, None, None)


def test_with_a_test_set_training_evaluates_on_what_it_holds_out_and_leaves_the_test_set_alone() -> None:
    test = Numbers(4)
    divided = hold_out(data(Numbers(30), test), 0.1, seed=0)
    assert divided.data.test is test and len(targets(divided.validation)) == 3
    assert len(divided.data.train) == 27


class Labelled(Numbers):
    def __init__(self, counts: dict[int, int]) -> None:
        self.targets = [label for label, count in counts.items() for _ in range(count)]
        super().__init__(len(self.targets))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(index)), self.targets[index]


def test_every_class_is_held_out_in_proportion_unless_the_run_is_from_an_earlier_version() -> None:
    """Of 40 images of each of three classes, 12, 5 and 13 were held out."""
    samples = data(Labelled({0: 40, 1: 40, 2: 40}))
    for seed in range(5):
        divided = hold_out(samples, 0.25, seed)
        held_out = Counter(targets(divided.validation))
        assert held_out == {0: 10, 1: 10, 2: 10} and len(divided.data.train) == 90
        assert class_labels(divided.data.train).tolist() == targets(divided.data.train)  # type: ignore[union-attr]
    assert divided.note is not None and divided.note.endswith("chosen by seed=4 across all classes")
    uneven = Counter(targets(hold_out(data(Labelled({3: 100, 5: 10, 9: 1})), 0.1, 0).validation))
    assert uneven == {3: 10, 5: 1}, "and not the only sample of the third class"
    before = hold_out(samples, 0.25, 0, stratify=False)
    order = torch.randperm(120, generator=generator_for(0, "validation"))
    first = order[order != samples.longest][:30].sort().values
    assert targets(before.validation) == [Labelled({0: 40, 1: 40, 2: 40}).targets[index] for index in first]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, float("nan")])
def test_a_fraction_is_between_0_and_1(fraction: float) -> None:
    with pytest.raises(ConfigError, match="must be between 0 and 1, or null"):
        hold_out(data(Numbers(30)), fraction, seed=0)


def test_one_sample_cannot_be_divided() -> None:
    with pytest.raises(DataError, match="a single sample cannot be divided; give at least 2"):
        hold_out(replace(data(Numbers(1)), longest=0), None, seed=0)
