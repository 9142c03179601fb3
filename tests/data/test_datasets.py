"""Images in memory have the same bits one by one and in batches; derived seeds never change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_cli.data.datasets import BatchedSamples, Data, ImageSamples, derived_seed
from gpipe_cli.errors import DataError


@settings(max_examples=40)
@given(
    length=st.integers(1, 20),
    side=st.integers(1, 12),
    size=st.none() | st.integers(1, 20),
    indices=st.lists(st.integers(0, 10**6), min_size=1, max_size=9),
)
def test_a_batch_is_bitwise_its_samples(length: int, side: int, size: int | None, indices: list[int]) -> None:
    images = torch.arange(length * side * side).remainder(256).to(torch.uint8).view(length, 1, side, side)
    samples = ImageSamples(images, torch.arange(length), size=size)
    indices = [index % length for index in indices]
    inputs, targets = samples.batch(torch.tensor(indices))
    assert inputs.shape == (len(indices), *samples.shape)
    assert targets.tolist() == indices
    for index, input, target in zip(indices, inputs, targets, strict=True):
        sample, sample_target = samples[index]
        assert torch.equal(input, sample) and torch.equal(target, sample_target)


def test_white_becomes_one_and_black_zero() -> None:
    images = torch.tensor([0, 8, 16], dtype=torch.uint8).view(3, 1, 1, 1)
    inputs, _ = ImageSamples(images, torch.zeros(3), white=16).batch(torch.arange(3))
    assert inputs.flatten(1).tolist() == [[0.0] * 3, [0.5] * 3, [1.0] * 3]


def test_writing_to_a_batch_does_not_change_the_data() -> None:
    samples = ImageSamples(torch.ones(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(1), white=1)
    inputs, targets = samples.batch(torch.tensor([0]))
    inputs.zero_(), targets.fill_(5)
    assert samples[0][0].tolist() == torch.ones(3, 2, 2).tolist()
    assert samples[0][1] == 0


@pytest.mark.parametrize("index", [-4, 3])
def test_an_index_out_of_range_is_an_error(index: int) -> None:
    samples = ImageSamples(torch.ones(3, 3, 2, 2, dtype=torch.uint8), torch.zeros(3))
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        samples[index]


def test_data_in_memory_is_recognized_as_batched() -> None:
    assert isinstance(ImageSamples(torch.ones(1, 1, 1, 1, dtype=torch.uint8), torch.ones(1)), BatchedSamples)
    assert not isinstance([], BatchedSamples)


def test_a_seed_is_the_same_in_every_process_and_version() -> None:
    assert derived_seed(0, "order", 1) == 7021862330116196507


parts = st.lists(st.integers() | st.text(max_size=5), max_size=4)


@settings(max_examples=50)
@given(left=parts, right=parts)
def test_different_parts_give_different_seeds_that_torch_accepts(
    left: list[int | str], right: list[int | str]
) -> None:
    assert (derived_seed(*left) == derived_seed(*right)) == (left == right)
    assert 0 <= derived_seed(*left) < 2**63


def test_class_names_that_do_not_match_the_classes_are_refused() -> None:
    samples = ImageSamples(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.zeros(1))
    with pytest.raises(DataError, match="data: has 1 class names for 2 classes"):
        Data(samples, samples, classes=2, shape=(3, 2, 2), class_names=("cat",))
