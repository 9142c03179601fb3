"""The bundled digits are complete, split fairly and described correctly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import gpipe_cli.data
from gpipe_cli.data import digits
from gpipe_cli.data.datasets import Samples
from gpipe_cli.errors import ConfigError

FILES = Path(gpipe_cli.data.__file__).parent / "files"


def everything(samples: Samples) -> tuple[Tensor, Tensor]:
    pairs = [samples[index] for index in range(len(samples))]
    return torch.stack([input for input, _ in pairs]), torch.stack(
        [torch.as_tensor(target) for _, target in pairs]
    )


def test_the_split_is_fixed_fair_and_loses_nothing() -> None:
    data = digits.build(size=None)
    train, train_labels = everything(data.train)
    test, test_labels = everything(data.test)
    assert (len(train), len(test)) == (1433, 364)
    assert torch.bincount(test_labels).tolist() == [36, 37, 36, 37, 37, 37, 37, 36, 35, 36]
    assert torch.bincount(torch.cat([train_labels, test_labels])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    ink = [int((images[:, 0] * 16).sum()) for images in (train, test)]
    assert sum(ink) == 561_718, "what scikit-learn's copy holds"
    assert ink[1] == 113_553


def test_images_have_three_channels_and_the_given_size() -> None:
    data = digits.build()
    input, target = data.train[0]
    assert data.shape == tuple(input.shape) == (3, 32, 32)
    assert torch.equal(input[0], input[1]) and torch.equal(input[0], input[2])
    assert float(input.min()) >= 0 and float(input.max()) <= 1
    assert target == 0 and data.classes == 10 and data.class_names == tuple(map(str, range(10)))
    assert digits.build(size=20).shape == (3, 20, 20)
    assert digits.build(size=None).shape == (3, 8, 8)


def test_mean_and_standard_deviation_are_right() -> None:
    data = digits.build()
    train, _ = everything(data.train)
    assert data.mean == pytest.approx([float(train.mean())] * 3, abs=1e-3)
    assert data.std == pytest.approx([float(train.std())] * 3, abs=1e-3)
    assert not data.flips


def test_source_and_licence_are_next_to_the_file() -> None:
    text = (FILES / "digits.txt").read_text()
    assert "archive.ics.uci.edu" in text and "CC BY 4.0" in text
    assert (FILES / "digits.safetensors").stat().st_size < 200_000


@pytest.mark.parametrize(("key", "value"), [("size", 0), ("size", "big"), ("workers", -1), ("workers", True)])
def test_a_wrong_key_is_named_with_its_value(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}={value}: must be a whole number of at least \d"):
        digits.build(**{key: value})  # type: ignore[arg-type]
