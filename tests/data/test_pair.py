"""Two datasets of torchvision or your own as one `Data`."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.data.pair import build
from gpipe_cli.errors import ConfigError, DataError
from tests.support.command_line import Gpipe

FAKE = "{_target_:torchvision.datasets.FakeData,size:24,image_size:[3,20,12],num_classes:5}"


@pytest.mark.slow
def test_two_datasets_of_torchvision_train_from_the_command_line(gpipe: Gpipe) -> None:
    overrides = ["data=pair", f"data.train={FAKE}", f"data.test={FAKE}", "data.classes=5", "data.size=16"]
    answer = gpipe("train", *overrides, "batch_size=12", "chunks=2", "steps=1", "threads=1", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["steps"] == 1


def test_a_dataset_that_is_not_allowed_is_refused_by_name(gpipe: Gpipe) -> None:
    not_allowed = "{_target_:torchvision.datasets.CIFAR10,root:.}"
    answer = gpipe("train", "data=pair", f"data.train={not_allowed}", f"data.test={FAKE}", "data.classes=5")
    assert answer.code == 2
    assert "data.train._target_=torchvision.datasets.CIFAR10: not allowed here" in answer.err


def test_tensors_are_used_unchanged() -> None:
    samples = [(torch.rand(3, 4, 4), 1), (torch.rand(3, 4, 4), 0)]
    dataset = torch.utils.data.TensorDataset(
        torch.stack([input for input, _ in samples]), torch.tensor([1, 0])
    )
    data = build(dataset, dataset, classes=2)
    assert data.shape == (3, 4, 4)
    assert torch.equal(data.train[0][0], samples[0][0])


def test_a_value_that_is_not_a_dataset_is_refused() -> None:
    dataset = torch.utils.data.TensorDataset(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ConfigError, match=r"data.test: must be a dataset"):
        build(dataset, {"a": 1}, classes=2)
    with pytest.raises(DataError, match=r"data.test: has no samples"):
        build(dataset, torch.utils.data.TensorDataset(torch.zeros(0, 3)), classes=2)


@pytest.mark.parametrize(
    ("attribute", "names"),
    [(["cat", "dog"], ("cat", "dog")), (["cat"], None), ([1, 2], None), (2, None)],
)
def test_class_names_are_those_that_a_dataset_of_torchvision_has(
    attribute: object, names: tuple[str, ...] | None
) -> None:
    dataset = torch.utils.data.TensorDataset(torch.zeros(2, 3), torch.zeros(2))
    dataset.classes = attribute  # type: ignore[attr-defined]
    assert build(dataset, dataset, classes=2).class_names == names
