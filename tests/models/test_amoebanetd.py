"""AmoebaNet-D accepts images of any size; its cells read the two cells before them."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.amoebanetd import build


@pytest.mark.parametrize("side", [(32, 32), (28, 28), (37, 50)])
def test_odd_sides_are_fine(side: tuple[int, int]) -> None:
    model = build(7, 3, 8, input_shape=(1, *side))
    assert model(torch.randn(2, 1, *side)).shape == (2, 7)


def test_a_layer_is_a_cell() -> None:
    names = [name for name, _ in build(num_layers=6).named_children()]
    assert names == [
        "stem", "stem_reduction1", "stem_reduction2", "cell1_1", "cell1_2", "reduction1",
        "cell2_1", "cell2_2", "reduction2", "cell3_1", "cell3_2", "head",
    ]  # fmt: skip


def test_each_reduction_halves_the_size_and_a_cell_passes_on_its_input() -> None:
    model = build().eval()
    state = model[0](torch.randn(1, 3, 64, 64))
    sides = [state.shape[-1]]
    for cell in model[1:-1]:
        before, state = state, cell(state)
        last = before if isinstance(before, torch.Tensor) else before[0]
        assert state[1] is last
        sides.append(state[0].shape[-1])
    assert sides == [32, 16, 8, 8, 4, 4, 2, 2]


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_layers=4: must be a multiple of 3"):
        build(num_layers=4)
    with pytest.raises(ConfigError, match=r"model\.num_filters=20: must be a multiple of 8"):
        build(num_filters=20)
    with pytest.raises(ConfigError, match=r"amoebanetd takes images, and the data has the shape \[32\]"):
        build(input_shape=(32,))
