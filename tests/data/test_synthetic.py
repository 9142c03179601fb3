"""Generated data is the same everywhere, has any shape, and can be learnt."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_cli.data import synthetic
from gpipe_cli.errors import ConfigError


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    classes=st.integers(1, 12),
    length=st.integers(1, 40),
    seed=st.integers(0, 5),
)
def test_any_shape_length_and_number_of_classes(
    shape: list[int], classes: int, length: int, seed: int
) -> None:
    data, again = (synthetic.build(shape, classes, length, seed) for _ in range(2))
    assert (len(data.train), len(data.test), data.classes) == (length, max(1, length // 4), classes)
    assert data.shape == tuple(shape)
    for part, same in ((data.train, again.train), (data.test, again.test)):
        inputs, targets = part.batch(torch.arange(len(part)))
        assert inputs.shape == (len(part), *shape)
        assert int(targets.min()) >= 0 and int(targets.max()) < classes
        sample, target = same[len(part) - 1]
        assert torch.equal(inputs[-1], sample) and torch.equal(targets[-1], target)


def test_samples_differ_from_each_other_and_with_the_seed() -> None:
    data, other = synthetic.build(length=64), synthetic.build(length=64, seed=1)
    inputs = torch.cat([part.batch(torch.arange(len(part)))[0] for part in (data.train, data.test)])
    assert len(torch.unique(inputs, dim=0)) == 64 + 16
    assert not torch.equal(inputs[0], other.train[0][0])


def test_held_out_samples_are_recognized_by_what_was_learnt() -> None:
    data = synthetic.build(shape=[3, 8, 8], length=400)
    inputs, targets = data.train.batch(torch.arange(400))
    means = torch.stack([inputs[targets == label].mean(0) for label in range(10)]).flatten(1)
    held_out, labels = data.test.batch(torch.arange(100))
    nearest = torch.cdist(held_out.flatten(1), means).argmin(1)
    assert float((nearest == labels).float().mean()) > 0.99


def test_size_replaces_the_sides_of_an_image() -> None:
    assert synthetic.build(size=16).shape == (3, 16, 16)
    with pytest.raises(ConfigError, match=r"data\.size=16: applies to images only, and data\.shape is \[5\]"):
        synthetic.build(shape=[5], size=16)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"shape": []}, r"data\.shape=\[\]: must be a list of whole numbers"),
        ({"shape": 3}, r"data\.shape=3: must be a list"),
        ({"shape": [3, 0]}, r"data\.shape=0: must be a whole number of at least 1"),
        ({"classes": 0}, r"data\.classes=0: must be"),
        ({"length": 1.5}, r"data\.length=1\.5: must be"),
    ],
)
def test_a_wrong_key_is_named_with_its_value(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthetic.build(**keys)  # type: ignore[arg-type]
