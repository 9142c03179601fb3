"""Generated data is the same everywhere, has any shape, and can be learnt; shapes match their masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_cli.data.datasets import Data
from gpipe_cli.data.generated import build_shapes, build_synthetic
from gpipe_cli.data.loading import batches
from gpipe_cli.errors import ConfigError


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    classes=st.integers(1, 12),
    length=st.integers(1, 40),
    seed=st.integers(0, 5),
)
def test_synthetic_data_has_any_shape_length_and_number_of_classes(
    shape: list[int], classes: int, length: int, seed: int
) -> None:
    data, again = (build_synthetic(shape, classes, length, seed) for _ in range(2))
    assert (len(data.train), len(data.test), data.classes) == (length, max(1, length // 4), classes)
    assert data.shape == tuple(shape)
    for part, same in ((data.train, again.train), (data.test, again.test)):
        inputs, targets = part.batch(torch.arange(len(part)))
        assert inputs.shape == (len(part), *shape)
        assert int(targets.min()) >= 0 and int(targets.max()) < classes
        sample, target = same[len(part) - 1]
        assert torch.equal(inputs[-1], sample) and torch.equal(targets[-1], target)


def test_synthetic_samples_differ_from_each_other_and_with_the_seed() -> None:
    data, other = build_synthetic(length=64), build_synthetic(length=64, seed=1)
    inputs = torch.cat([part.batch(torch.arange(len(part)))[0] for part in (data.train, data.test)])
    assert len(torch.unique(inputs, dim=0)) == 64 + 16
    assert not torch.equal(inputs[0], other.train[0][0])


def test_held_out_synthetic_samples_are_recognized_by_what_was_learnt() -> None:
    data = build_synthetic(shape=[3, 8, 8], length=400)
    inputs, targets = data.train.batch(torch.arange(400))
    means = torch.stack([inputs[targets == label].mean(0) for label in range(10)]).flatten(1)
    held_out, labels = data.test.batch(torch.arange(100))
    nearest = torch.cdist(held_out.flatten(1), means).argmin(1)
    assert float((nearest == labels).float().mean()) > 0.99


def test_size_replaces_the_sides_of_an_image() -> None:
    assert build_synthetic(size=16).shape == (3, 16, 16)
    with pytest.raises(ConfigError, match=r"data\.size=16: applies to images only, and data\.shape is \[5\]"):
        build_synthetic(shape=[5], size=16)


def test_a_sample_of_shapes_is_an_image_and_a_class_for_each_of_its_pixels() -> None:
    data = build_shapes(size=24, length=40)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (40, 10, 4, (3, 24, 24))
    input, target = next(batches(data.train, batch_size=40, seed=0, epoch=0, shuffle=False))
    assert input.shape == (40, 3, 24, 24) and input.dtype == torch.float32
    assert float(input.min()) >= 0 and float(input.max()) <= 1
    assert target.shape == (40, 24, 24) and target.dtype == torch.long
    assert torch.bincount(target.flatten(), minlength=4).min() > 500, "all four are frequent"
    assert all(mask.any() and not mask.all() for mask in target.bool()), "each has a shape and a background"


def test_a_sample_of_shapes_depends_on_seed_and_index_alone() -> None:
    once, again, other = build_shapes(), build_shapes(length=7), build_shapes(seed=1)
    for index in (3, 0, 3):
        for first, same, different in zip(
            once.train[index], again.train[index], other.train[index], strict=True
        ):
            assert torch.equal(torch.as_tensor(first), torch.as_tensor(same))
            assert not torch.equal(torch.as_tensor(first), torch.as_tensor(different))
    first_held_out, eighth = again.test[0], once.train[7]
    assert torch.equal(first_held_out[0], eighth[0]), "what is held out comes after what is trained on"
    with pytest.raises(IndexError, match="sample 7 of 7"):
        again.train[7]


def test_a_shape_has_its_own_color_and_outline() -> None:
    samples = build_shapes(size=32).train
    image, mask = samples[0]
    assert isinstance(mask, torch.Tensor)
    for kind in mask.unique():
        inside = image[:, mask == kind]
        assert float(inside.std(1).mean()) < float(image.flatten(1).std(1).mean())


def test_mean_and_standard_deviation_of_shapes_are_about_right() -> None:
    data = build_shapes()
    images = torch.stack([data.train[index][0] for index in range(200)])
    assert data.mean == pytest.approx([float(images.mean())] * 3, abs=0.05)
    assert data.std == pytest.approx([float(images.std())] * 3, abs=0.05)


@pytest.mark.parametrize(
    ("build", "keys", "message"),
    [
        (build_synthetic, {"shape": []}, r"data\.shape=\[\]: must be a list of whole numbers"),
        (build_synthetic, {"shape": 3}, r"data\.shape=3: must be a list"),
        (build_synthetic, {"shape": [3, 0]}, r"data\.shape=0: must be a whole number of at least 1"),
        (build_synthetic, {"classes": 0}, r"data\.classes=0: must be"),
        (build_synthetic, {"length": 1.5}, r"data\.length=1\.5: must be"),
        (build_shapes, {"size": 7}, r"data\.size=7: must be a whole number of at least 8"),
        (build_shapes, {"length": 0}, r"data\.length=0: must be a whole number of at least 1"),
    ],
)
def test_a_wrong_key_is_named_with_its_value(
    build: Callable[..., Data], keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**keys)
