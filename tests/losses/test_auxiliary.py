"""Auxiliary heads count their share, and a batch in pieces gives the loss of the whole."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.auxiliary import AuxiliaryCrossEntropy
from gpipe_cli.losses.measures import measure_of

TARGET = torch.tensor([0, 2, 1, 2])


def test_each_head_counts_its_weight_in_a_tuple_and_in_a_dict() -> None:
    main, first, second = torch.randn(3, 4, 3)
    loss = AuxiliaryCrossEntropy(0.3)
    expected = (
        cross_entropy(main, TARGET) + 0.3 * cross_entropy(first, TARGET) + 0.3 * cross_entropy(second, TARGET)
    )
    assert torch.equal(loss((main, first, second), TARGET), expected)
    assert torch.equal(loss({"out": main, "a": first, "b": second}, TARGET), expected)


def test_a_single_output_has_plain_cross_entropy() -> None:
    scores = torch.randn(4, 3)
    loss = AuxiliaryCrossEntropy(label_smoothing=0.1)
    expected = cross_entropy(scores, TARGET, label_smoothing=0.1)
    assert torch.equal(loss(scores, TARGET), expected)
    assert torch.equal(loss((scores,), TARGET), expected)


def test_only_the_main_output_is_measured() -> None:
    right = torch.eye(3)[TARGET]
    loss = AuxiliaryCrossEntropy()
    for output in (right, (right, 1 - right), {"out": right, "aux": 1 - right}):
        assert loss.measure(output, TARGET)["top1"] == 4
    assert measure_of(loss) == loss.measure


def test_pieces_weighed_by_their_size_give_the_loss_of_the_whole() -> None:
    outputs, masks = torch.randn(2, 5, 3, 4, 4).double(), torch.randint(3, (5, 4, 4))
    loss = AuxiliaryCrossEntropy()
    pieces = [slice(0, 3), slice(3, 5)]
    parts = [loss(tuple(outputs[:, piece]), masks[piece]) * len(masks[piece]) / 5 for piece in pieces]
    torch.testing.assert_close(sum(parts), loss(tuple(outputs), masks), rtol=0, atol=1e-12)


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=rf"loss\.weight={weight}: must be a finite number of at least 0"):
        AuxiliaryCrossEntropy(weight)
