from __future__ import annotations

import pytest
import torch

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.mlp import build


@pytest.mark.parametrize("shape", [(5,), (3, 8, 8), (2, 3, 4, 5)])
def test_samples_of_any_shape_are_flattened(shape: tuple[int, ...]) -> None:
    model = build(width=6, depth=2, num_classes=4, input_shape=shape)
    assert model(torch.randn(3, *shape)).shape == (3, 4)
    assert [name for name, _ in model.named_children()] == ["hidden0", "hidden1", "head"]


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"model\.width=0: must be a whole number of at least 1"):
        build(width=0)
    with pytest.raises(ConfigError, match=r"model\.depth=True: must be a whole number of at least 1"):
        build(depth=True)
