"""Reading CIFAR's binary files, and the errors for files that are missing or wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpipe_cli.data import cifar
from gpipe_cli.errors import ConfigError, DataError

RECORDS = 3
FILES = {
    "cifar10": ("cifar-10-batches-bin", 1, [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]),
    "cifar100": ("cifar-100-binary", 2, ["train.bin", "test.bin"]),
}


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, ten = FILES["cifar10"]
    _, _, hundred = FILES["cifar100"]
    monkeypatch.setattr(cifar, "_RECORDS", dict.fromkeys([*ten, *hundred], RECORDS))


def write(root: Path, name: str) -> Path:
    """Files whose n-th image is all n, with label n (and superclass 7 in CIFAR-100)."""
    folder, labels, files = FILES[name]
    (root / folder).mkdir()
    for number, file in enumerate(files):
        records = [[*([7] * (labels - 1)), n, *([n] * 3072)] for n in range(number, number + RECORDS)]
        (root / folder / file).write_bytes(b"".join(map(bytes, records)))
    return root / folder


@pytest.mark.parametrize(("name", "train", "test"), [("cifar10", range(7), 5), ("cifar100", range(3), 1)])
def test_images_and_labels_come_from_the_published_layout(
    tmp_path: Path, name: str, train: range, test: int
) -> None:
    write(tmp_path, name)
    data = cifar.build(name, root=str(tmp_path))
    inputs, targets = data.train.batch(torch.arange(len(data.train)))
    assert sorted(set(targets.tolist())) == list(train)
    assert torch.equal(inputs, (targets / 255).float().view(-1, 1, 1, 1).expand(-1, 3, 32, 32))
    assert [int(data.test[index][1]) for index in range(3)] == [test, test + 1, test + 2]
    assert data.shape == (3, 32, 32) and data.flips
    assert data.classes == int(name.removeprefix("cifar"))
    assert data.class_names is not None and data.class_names == tuple(sorted(set(data.class_names)))
    assert {"cifar10": "truck", "cifar100": "worm"}[name] == data.class_names[-1]
    assert cifar.build(name, root=str(tmp_path), size=8).shape == (3, 8, 8)


def test_the_first_channel_comes_first(tmp_path: Path) -> None:
    folder = write(tmp_path, "cifar100")
    record = bytes([0, 0, *([255] * 1024), *([0] * 2048)])
    (folder / "test.bin").write_bytes(record * RECORDS)
    image, _ = cifar.build("cifar100", root=str(tmp_path)).test[0]
    assert image.mean((1, 2)).tolist() == [1.0, 0.0, 0.0]


def test_a_missing_file_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data_batch_1\.bin is missing; unpack cifar-10-binary\.tar\.gz from https"
    ):
        cifar.build("cifar10", root=str(tmp_path))


@pytest.mark.parametrize("change", [-1, 1, -3073])
def test_a_file_of_another_length_is_not_the_published_one(tmp_path: Path, change: int) -> None:
    path = write(tmp_path, "cifar10") / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"\0")
    with pytest.raises(
        DataError, match=r"data_batch_3\.bin: .* bytes instead of 9219: not the published file"
    ):
        cifar.build("cifar10", root=str(tmp_path))


def test_a_label_out_of_range_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "cifar10") / "test_batch.bin"
    path.write_bytes(bytes([200]) + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"test_batch\.bin: has the label 200, but there are 10 classes"):
        cifar.build("cifar10", root=str(tmp_path))


def test_the_pickled_version_is_not_read_and_the_error_names_the_binary_archive(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    message = (
        r"cifar-10-batches-py is pickled and can run code, so gpipe does not read it; unpack cifar-10-binary"
    )
    with pytest.raises(DataError, match=message):
        cifar.build("cifar10", root=str(tmp_path))


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.name=cifar1000: choose one of cifar10, cifar100"):
        cifar.build("cifar1000")
