"""The image sets that gpipe reads itself: CIFAR, MNIST and the digits, and the errors for missing or broken files."""

from __future__ import annotations

import gzip
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpipe_cli.data import images
from gpipe_cli.data.datasets import Data, Samples
from gpipe_cli.errors import ConfigError, DataError

FILES = Path(images.__file__).parent / "files"
RECORDS = 3
CIFAR_FILES = {
    "cifar10": ("cifar-10-batches-bin", 1, [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]),
    "cifar100": ("cifar-100-binary", 2, ["train.bin", "test.bin"]),
}


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [file.removesuffix(".bin") for _, _, names in CIFAR_FILES.values() for file in names]
    monkeypatch.setattr(images, "_CIFAR_RECORDS", dict.fromkeys(files, RECORDS))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda root: images.build_cifar("cifar10", root),
            r"data_batch_1\.bin is missing; unpack cifar-10-binary\.tar\.gz from https.* or cifar-10-python\.tar\.gz",
        ),
        (images.build_mnist, r"train-images-idx3-ubyte is missing; put the four files of MNIST.*/mnist"),
    ],
)
def test_a_missing_file_says_what_to_put_where(
    tmp_path: Path, build: Callable[[str], Data], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        build(str(tmp_path))


def write_cifar(root: Path, name: str) -> Path:
    """Files whose n-th image is all n, with label n (and superclass 7 in CIFAR-100)."""
    folder, labels, files = CIFAR_FILES[name]
    (root / folder).mkdir()
    for number, file in enumerate(files):
        records = [[*([7] * (labels - 1)), n, *([n] * 3072)] for n in range(number, number + RECORDS)]
        (root / folder / file).write_bytes(b"".join(map(bytes, records)))
    return root / folder


@pytest.mark.parametrize(("name", "train", "test"), [("cifar10", range(7), 5), ("cifar100", range(3), 1)])
def test_cifar_comes_from_the_published_layout(tmp_path: Path, name: str, train: range, test: int) -> None:
    write_cifar(tmp_path, name)
    data = images.build_cifar(name, root=str(tmp_path))
    inputs, targets = data.train.batch(torch.arange(len(data.train)))
    assert sorted(set(targets.tolist())) == list(train)
    assert torch.equal(inputs, (targets / 255).float().view(-1, 1, 1, 1).expand(-1, 3, 32, 32))
    assert [int(data.test[index][1]) for index in range(3)] == [test, test + 1, test + 2]
    assert data.shape == (3, 32, 32) and data.flips
    assert data.classes == int(name.removeprefix("cifar"))
    assert data.class_names is not None and data.class_names == tuple(sorted(set(data.class_names)))
    assert {"cifar10": "truck", "cifar100": "worm"}[name] == data.class_names[-1]
    assert images.build_cifar(name, root=str(tmp_path), size=8).shape == (3, 8, 8)


def test_the_first_channel_of_cifar_comes_first(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path, "cifar100")
    record = bytes([0, 0, *([255] * 1024), *([0] * 2048)])
    (folder / "test.bin").write_bytes(record * RECORDS)
    image, _ = images.build_cifar("cifar100", root=str(tmp_path)).test[0]
    assert image.mean((1, 2)).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("change", [-1, 1, -3073])
def test_a_cifar_file_of_another_length_is_not_the_published_one(tmp_path: Path, change: int) -> None:
    path = write_cifar(tmp_path, "cifar10") / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"\0")
    with pytest.raises(
        DataError, match=r"data_batch_3\.bin: .* bytes instead of 9219: not the published file"
    ):
        images.build_cifar("cifar10", root=str(tmp_path))


def test_a_label_out_of_range_is_named(tmp_path: Path) -> None:
    path = write_cifar(tmp_path, "cifar10") / "test_batch.bin"
    path.write_bytes(bytes([200]) + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"test_batch\.bin: has the label 200, but there are 10 classes"):
        images.build_cifar("cifar10", root=str(tmp_path))


def python_2_pickle(images: bytes, labels: list[int], key: bytes = b"labels", call: bytes = b"") -> bytes:
    """What cPickle of Python 2 wrote, as in the published files; call: opcodes put in front of the closing one."""

    def text(content: bytes) -> bytes:
        return b"U" + bytes([len(content)]) + content

    shape = b"K" + bytes([len(labels)]) + b"M\x00\x0c\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03(K\x01"
    )
    array += (
        shape
        + b"cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
    )
    array += b"K\x00tb\x89T" + len(images).to_bytes(4, "little") + images + b"tb"
    classes = b"]q\x06(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    names = text(b"filenames") + b"]q\x07(" + text(b"leptodactylus_pentadactylus_s_000004.png") + b"e"
    return b"\x80\x02}q\x00(" + names + text(key) + classes + text(b"data") + array + b"u" + call + b"."


def write_python_cifar(root: Path, name: str) -> Path:
    folder, _, files = CIFAR_FILES[name]
    own = root / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    own.mkdir()
    write_cifar(root, name)
    for file in files:
        records = (root / folder / file).read_bytes()
        parts = [
            records[start : start + len(records) // RECORDS]
            for start in range(0, len(records), len(records) // RECORDS)
        ]
        images, labels = b"".join(part[-3072:] for part in parts), [part[-3073] for part in parts]
        key = {"cifar10": b"labels", "cifar100": b"fine_labels"}[name]
        (own / file.removesuffix(".bin")).write_bytes(python_2_pickle(images, labels, key))
    return own


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_archive_that_torchvision_downloads_has_the_samples_of_the_binary_one(
    tmp_path: Path, name: str
) -> None:
    write_python_cifar(tmp_path, name)
    binary = images.build_cifar(name, root=str(tmp_path))
    shutil.rmtree(tmp_path / CIFAR_FILES[name][0])
    pickled = images.build_cifar(name, root=str(tmp_path))
    for own, other in ((pickled.train, binary.train), (pickled.test, binary.test)):
        everything = torch.arange(len(other))
        assert all(map(torch.equal, own.batch(everything), other.batch(everything)))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_python_archive_that_python_3_wrote_again_is_read_too(tmp_path: Path, protocol: int) -> None:
    folder = write_python_cifar(tmp_path, "cifar100")
    shutil.rmtree(tmp_path / "cifar-100-binary")
    rows = numpy.full((RECORDS, 3072), 255, dtype=numpy.uint8)
    content = {b"data": rows, b"fine_labels": [5, 99, 5], b"coarse_labels": [0, 1, 2]}
    (folder / "test").write_bytes(pickle.dumps(content, protocol))
    test = images.build_cifar("cifar100", root=str(tmp_path)).test
    assert [int(test[index][1]) for index in range(3)] == [5, 99, 5] and bool((test[0][0] == 1).all())


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


IMAGES = bytes(RECORDS * 3072)
PUBLISHED = python_2_pickle(IMAGES, [0, 0, 0])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps({"data": Evil()}, 2), r"names __builtin__\.getattr,.*nothing of it was run"),
        (pickle.dumps({"data": Evil()}, 4), r"names pathlib\.Path\.touch"),
        (
            python_2_pickle(IMAGES, [0, 0, 0], call=b"0cos\nsystem\n(U\x02lstR"),
            "uses the opcode POP of pickle",
        ),
        (python_2_pickle(IMAGES, [0, 0, 0], call=b"cos\nsystem\n"), r"names os\.system"),
        (python_2_pickle(IMAGES, [0, 0, 0], call=b"U\x01a"), "damaged, or not a pickled dict"),
        (b"\x80\x02(ibuiltins\neval\n.", "uses the opcode INST"),
        (b"\x80\x02}}b.", "gives a state to a dict"),
        (b"\x80\x02]U\x01aa.", "not a pickled dict .*holds a list"),
        (PUBLISHED[:-100], "damaged, or not a pickled dict"),
        (b"\x1f\x8b", "damaged, or not a pickled dict"),
        (b"", "damaged, or not a pickled dict"),
        (PUBLISHED.replace(b"U\x02u1", b"U\x02f1"), "data is not an array of 3 images as bytes"),
        (
            PUBLISHED.replace(b"K\x03M\x00\x0c\x86", b"K\x02M\x00\x0c\x86"),
            "data is not an array of 3 images as bytes",
        ),
        (python_2_pickle(IMAGES, [0, 0, 0], b"classes"), "labels has not 3 classes"),
        (python_2_pickle(IMAGES, [0, 0, 200]), "has the label 200, but there are 10 classes"),
        (PUBLISHED + bytes(20000), "has more than 19200 bytes: not the published file"),
    ],
)
def test_a_python_archive_that_is_not_the_published_one_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_python_cifar(tmp_path, "cifar10") / "data_batch_2"
    shutil.rmtree(tmp_path / "cifar-10-batches-bin")
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"data_batch_2: .*{says}"):
        images.build_cifar("cifar10", root=str(tmp_path))
    assert not Path("executed").exists()


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.name=cifar1000: choose one of cifar10, cifar100"):
        images.build_cifar("cifar1000")


def idx(*lengths: int, content: bytes) -> bytes:
    return bytes([0, 0, 8, len(lengths)]) + b"".join(n.to_bytes(4, "big") for n in lengths) + content


def write_mnist(root: Path, *, compressed: bool = False) -> Path:
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
def test_mnist_comes_from_its_four_files(tmp_path: Path, compressed: bool) -> None:
    write_mnist(tmp_path, compressed=compressed)
    data = images.build_mnist(root=str(tmp_path))
    inputs, targets = data.train.batch(torch.arange(6))
    assert targets.tolist() == list(range(6)) and len(data.test) == 2
    assert torch.equal(inputs, (targets / 255).float().view(-1, 1, 1, 1).expand(-1, 3, 28, 28))
    assert data.shape == (3, 28, 28) and not data.flips
    assert images.build_mnist(root=str(tmp_path), channels=1, size=32).shape == (1, 32, 32)


@settings(max_examples=60)
@given(length=st.integers(0, 120), compressed=st.booleans())
def test_an_idx_file_cut_short_anywhere_is_an_error_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, length: int, compressed: bool
) -> None:
    content = idx(5, 4, 5, content=bytes(range(100)))
    content = gzip.compress(content) if compressed else content
    path = tmp_path_factory.mktemp("idx") / ("images.gz" if compressed else "images")
    path.write_bytes(content[:length])
    if length >= len(content):
        assert images.read_idx(path, dimensions=3).flatten().tolist() == list(range(100))
    else:
        with pytest.raises(DataError, match=r"images(\.gz)?: (damaged|not an idx|\d+ bytes of data instead)"):
            images.read_idx(path, dimensions=3)


def test_an_idx_header_with_a_wrong_size_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(idx(2**32 - 1, 2**32 - 1, 2**32 - 1, content=b"abc"))
    with pytest.raises(DataError, match="3 bytes of data instead of 79228162"):
        images.read_idx(path, dimensions=3)
    path.write_bytes(idx(0, 28, 28, content=b""))
    with pytest.raises(DataError, match="has no data"):
        images.read_idx(path, dimensions=3)


def test_labels_of_mnist_must_fit_the_images_and_the_classes(tmp_path: Path) -> None:
    labels = write_mnist(tmp_path) / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(5, content=bytes(5)))
    with pytest.raises(DataError, match="5 labels for 6 images in train-images"):
        images.build_mnist(root=str(tmp_path))
    labels.write_bytes(idx(6, content=bytes([0, 1, 2, 3, 4, 10])))
    with pytest.raises(DataError, match="has the label 10, but there are 10 classes"):
        images.build_mnist(root=str(tmp_path))


def everything(samples: Samples) -> tuple[Tensor, Tensor]:
    pairs = [samples[index] for index in range(len(samples))]
    return torch.stack([input for input, _ in pairs]), torch.stack(
        [torch.as_tensor(target) for _, target in pairs]
    )


def test_the_split_of_the_digits_is_fixed_fair_and_loses_nothing() -> None:
    data = images.build_digits(size=None)
    train, train_labels = everything(data.train)
    test, test_labels = everything(data.test)
    assert (len(train), len(test)) == (1433, 364)
    assert torch.bincount(test_labels).tolist() == [36, 37, 36, 37, 37, 37, 37, 36, 35, 36]
    assert torch.bincount(torch.cat([train_labels, test_labels])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    ink = [int((images[:, 0] * 16).sum()) for images in (train, test)]
    assert sum(ink) == 561_718, "what scikit-learn's copy holds"
    assert ink[1] == 113_553


def test_digits_have_three_channels_and_the_given_size() -> None:
    data = images.build_digits()
    input, target = data.train[0]
    assert data.shape == tuple(input.shape) == (3, 32, 32)
    assert torch.equal(input[0], input[1]) and torch.equal(input[0], input[2])
    assert float(input.min()) >= 0 and float(input.max()) <= 1
    assert target == 0 and data.classes == 10 and data.class_names == tuple(map(str, range(10)))
    assert images.build_digits(size=20).shape == (3, 20, 20)
    assert images.build_digits(size=None).shape == (3, 8, 8)


def test_mean_and_standard_deviation_of_the_digits_are_right() -> None:
    data = images.build_digits()
    train, _ = everything(data.train)
    assert data.mean == pytest.approx([float(train.mean())] * 3, abs=1e-3)
    assert data.std == pytest.approx([float(train.std())] * 3, abs=1e-3)
    assert not data.flips


def test_source_and_licence_of_the_digits_are_next_to_the_file() -> None:
    text = (FILES / "digits.txt").read_text()
    assert "archive.ics.uci.edu" in text and "CC BY 4.0" in text
    assert (FILES / "digits.safetensors").stat().st_size < 200_000


@pytest.mark.parametrize("size", [0, "big"])
def test_a_wrong_size_is_named(size: object) -> None:
    with pytest.raises(ConfigError, match=rf"data\.size={size}: must be a whole number of at least 1"):
        images.build_digits(size)  # type: ignore[arg-type]
