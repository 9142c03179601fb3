"""What transforms do to an input, and that they draw from the given generator only."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpipe_cli.data import transforms
from gpipe_cli.data.datasets import Data, generator_for
from gpipe_cli.data.generated import build_synthetic
from gpipe_cli.errors import ConfigError


@pytest.fixture
def data() -> Data:
    made_up = build_synthetic(shape=[3, 6, 6], length=8)
    return dataclasses.replace(made_up, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0), flips=True)


def shifted(input: Tensor, down: int, right: int) -> Tensor:
    """The input moved with zeros behind it, told pixel by pixel."""
    output = torch.zeros_like(input)
    _, height, width = input.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row - down < height and 0 <= column - right < width:
                output[:, row, column] = input[:, row - down, column - right]
    return output


def test_none_leaves_inputs_alone(data: Data) -> None:
    assert transforms.none(data) == transforms.Transforms(train=None, test=None)


def test_basic_normalizes_samples_and_batches_with_the_datas_statistics(data: Data) -> None:
    basic = transforms.basic(data).train
    assert basic is not None and not basic.random and transforms.basic(data).test is not None
    inputs, _ = data.train.batch(torch.arange(8))
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (data.mean, data.std))
    expected = (inputs - mean) / std
    assert torch.equal(basic(inputs, None), expected)
    assert all(torch.equal(basic(inputs[index], None), expected[index]) for index in range(8))
    assert torch.equal(inputs, data.train.batch(torch.arange(8))[0]), "the input itself is not changed"


def test_explicit_statistics_take_precedence_over_the_datas(data: Data) -> None:
    basic = transforms.basic(data, mean=[0, 0, 0], std=[2, 2, 2]).test
    assert basic is not None
    input, _ = data.train[0]
    assert torch.equal(basic(input, None), input / 2)


@settings(max_examples=40)
@given(padding=st.integers(0, 5), flip=st.booleans(), seed=st.integers(0, 2**60))
def test_augment_returns_a_shifted_or_mirrored_image(padding: int, flip: bool, seed: int) -> None:
    data = build_synthetic(shape=[1, 4, 5], length=1)
    input, _ = data.train[0]
    augment = transforms.augment(data, padding=padding, flip=flip).train
    assert augment is not None and augment.random
    output = augment(input, generator_for(seed))
    reach = range(-padding, padding + 1)
    moved = [shifted(input, down, right) for down in reach for right in reach]
    allowed = moved + [image.flip(-1) for image in moved] if flip else moved
    assert any(torch.equal(output, image) for image in allowed)
    assert torch.equal(output, augment(input, generator_for(seed))), "the same generator gives the same bits"


def test_augment_reaches_every_shift_and_both_orientations() -> None:
    data = build_synthetic(shape=[1, 4, 4], length=1)
    input, _ = data.train[0]
    augment = transforms.augment(data, padding=1, flip=True).train
    assert augment is not None
    outputs = torch.stack([augment(input, generator_for(seed)) for seed in range(400)])
    assert len(torch.unique(outputs, dim=0)) == 3 * 3 * 2


def test_only_training_inputs_are_changed_at_random(data: Data) -> None:
    both = transforms.augment(data)
    assert both.train is not None and both.train.random
    assert both.test is not None and not both.test.random


def test_augment_mirrors_only_data_that_allows_flips(data: Data) -> None:
    digits = dataclasses.replace(data, flips=False, mean=None, std=None)
    input, _ = data.train[0]
    for keys, mirrored in (({}, False), ({"flip": True}, True)):
        augment = transforms.augment(digits, padding=0, **keys).train
        assert augment is not None
        outputs = [augment(input, generator_for(seed)) for seed in range(20)]
        assert any(torch.equal(output, input.flip(-1)) for output in outputs) is mirrored


def test_transforms_can_be_sent_to_another_process(data: Data) -> None:
    augment = transforms.augment(data).train
    copy = pickle.loads(pickle.dumps(augment))  # noqa: S301 - our own bytes
    assert augment is not None
    input, _ = data.train[0]
    assert torch.equal(copy(input, generator_for(3)), augment(input, generator_for(3)))


def test_wrong_keys_are_named_with_their_values(data: Data) -> None:
    with pytest.raises(ConfigError, match=r"transform\.mean=\[0\.5\].*: the data has 3 channels"):
        transforms.basic(data, mean=[0.5])
    with pytest.raises(ConfigError, match=r"transform\.std=\[1, 0, 1\]: must be greater than 0"):
        transforms.basic(data, std=[1, 0, 1])
    with pytest.raises(
        ConfigError, match=r"transform\.mean=\[0\], transform\.std=None: give both or neither"
    ):
        transforms.basic(build_synthetic(shape=[1, 2, 2]), mean=[0])
    with pytest.raises(ConfigError, match=r"transform\.padding=-1: must be a whole number"):
        transforms.augment(data, padding=-1)
    with pytest.raises(
        ConfigError, match=r"transform=augment: works on images only, and the data has the shape \[4\]"
    ):
        transforms.augment(build_synthetic(shape=[4]))
