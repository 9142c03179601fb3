"""Reading MNIST's idx files, compressed or not, and the errors for broken ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_cli.data import mnist
from gpipe_cli.errors import DataError


def idx(*lengths: int, content: bytes) -> bytes:
    return bytes([0, 0, 8, len(lengths)]) + b"".join(n.to_bytes(4, "big") for n in lengths) + content


def write(root: Path, *, compressed: bool = False) -> Path:
    folder = root / "mnist"
    folder.mkdir()
    for part, length in (("train", 6), ("t10k", 2)):
        images = idx(length, 28, 28, content=bytes(n for n in range(length) for _ in range(28 * 28)))
        labels = idx(length, content=bytes(range(length)))
        for name, content in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("compressed", [False, True])
def test_images_and_labels_come_from_the_four_files(tmp_path: Path, compressed: bool) -> None:
    write(tmp_path, compressed=compressed)
    data = mnist.build(root=str(tmp_path))
    inputs, targets = data.train.batch(torch.arange(6))
    assert targets.tolist() == list(range(6)) and len(data.test) == 2
    assert torch.equal(inputs, (targets / 255).float().view(-1, 1, 1, 1).expand(-1, 3, 28, 28))
    assert data.shape == (3, 28, 28) and not data.flips
    assert mnist.build(root=str(tmp_path), channels=1, size=32).shape == (1, 32, 32)


def test_a_missing_file_says_what_to_put_where(tmp_path: Path) -> None:
    (write(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(
        DataError, match=r"t10k-labels-idx1-ubyte is missing; put the four files of MNIST.*/mnist"
    ):
        mnist.build(root=str(tmp_path))


@settings(max_examples=60)
@given(length=st.integers(0, 120), compressed=st.booleans())
def test_a_file_cut_short_anywhere_is_an_error_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, length: int, compressed: bool
) -> None:
    content = idx(5, 4, 5, content=bytes(range(100)))
    content = gzip.compress(content) if compressed else content
    path = tmp_path_factory.mktemp("idx") / ("images.gz" if compressed else "images")
    path.write_bytes(content[:length])
    if length >= len(content):
        assert mnist.read_idx(path, dimensions=3).flatten().tolist() == list(range(100))
    else:
        with pytest.raises(DataError, match=r"images(\.gz)?: (damaged|not an idx|\d+ bytes of data instead)"):
            mnist.read_idx(path, dimensions=3)


def test_a_header_with_a_wrong_size_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(idx(2**32 - 1, 2**32 - 1, 2**32 - 1, content=b"abc"))
    with pytest.raises(DataError, match="3 bytes of data instead of 79228162"):
        mnist.read_idx(path, dimensions=3)
    path.write_bytes(idx(0, 28, 28, content=b""))
    with pytest.raises(DataError, match="has no data"):
        mnist.read_idx(path, dimensions=3)


def test_labels_must_fit_the_images_and_the_classes(tmp_path: Path) -> None:
    labels = write(tmp_path) / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(5, content=bytes(5)))
    with pytest.raises(DataError, match="5 labels for 6 images in train-images"):
        mnist.build(root=str(tmp_path))
    labels.write_bytes(idx(6, content=bytes([0, 1, 2, 3, 4, 10])))
    with pytest.raises(DataError, match="has the label 10, but there are 10 classes"):
        mnist.build(root=str(tmp_path))
