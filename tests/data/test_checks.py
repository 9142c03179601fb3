"""Batches that cannot be trained on are told apart before torch sees them."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.data.checks import check_batch, check_labels
from gpipe_cli.errors import DataError


def test_labels_of_the_classes_pass() -> None:
    check_labels(torch.tensor([0, 9, 5]), classes=10)
    check_labels(torch.tensor([], dtype=torch.long), classes=10)


@pytest.mark.parametrize("label", [10, -1, 255])
def test_a_label_out_of_range_is_named_with_the_number_of_classes(label: int) -> None:
    with pytest.raises(DataError, match=f"label {label} is out of range: the model has 10 classes, 0 to 9"):
        check_labels(torch.tensor([3, label, 4]), classes=10)


def test_inputs_and_targets_must_be_as_many() -> None:
    check_batch(torch.zeros(4, 2), torch.zeros(4))
    with pytest.raises(DataError, match="a batch of 4 inputs came with 3 targets"):
        check_batch(torch.zeros(4, 2), torch.zeros(3))
