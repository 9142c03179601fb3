"""Shapes match their masks, are the same on every machine, and cannot be told apart by color."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.data import shapes
from gpipe_cli.data.loading import batches
from gpipe_cli.errors import ConfigError


def test_a_sample_is_an_image_and_a_class_for_each_of_its_pixels() -> None:
    data = shapes.build(size=24, length=40)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (40, 10, 4, (3, 24, 24))
    input, target = next(batches(data.train, batch_size=40, seed=0, epoch=0, shuffle=False))
    assert input.shape == (40, 3, 24, 24) and input.dtype == torch.float32
    assert float(input.min()) >= 0 and float(input.max()) <= 1
    assert target.shape == (40, 24, 24) and target.dtype == torch.long
    assert torch.bincount(target.flatten(), minlength=4).min() > 500, "all four are frequent"
    assert all(mask.any() and not mask.all() for mask in target.bool()), "each has a shape and a background"


def test_a_sample_depends_on_seed_and_index_alone() -> None:
    once, again, other = shapes.build(), shapes.build(length=7), shapes.build(seed=1)
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
    samples = shapes.build(size=32).train
    image, mask = samples[0]
    assert isinstance(mask, torch.Tensor)
    for kind in mask.unique():
        inside = image[:, mask == kind]
        assert float(inside.std(1).mean()) < float(image.flatten(1).std(1).mean())


def test_mean_and_standard_deviation_are_about_right() -> None:
    data = shapes.build()
    images = torch.stack([data.train[index][0] for index in range(200)])
    assert data.mean == pytest.approx([float(images.mean())] * 3, abs=0.05)
    assert data.std == pytest.approx([float(images.std())] * 3, abs=0.05)


@pytest.mark.parametrize(("key", "value"), [("size", 7), ("length", 0), ("workers", -1)])
def test_a_wrong_key_is_named_with_its_value(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}={value}: must be a whole number of at least \d"):
        shapes.build(**{key: value})
