"""Images in a folder per class: which files count, how they become tensors, and the errors for broken ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from gpipe_cli.data import image_folder
from gpipe_cli.data.loading import batches
from gpipe_cli.errors import DataError

RED, BLUE = (255, 0, 0), (0, 0, 255)


def save(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (12, 12)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        save(tmp_path / part / "red" / "1.png", RED)
        save(tmp_path / part / "red" / "deeper" / "2.PNG", RED)
        save(tmp_path / part / "blue" / "1.png", BLUE)
        (tmp_path / part / "red" / "notes.txt").write_text("not an image")
    return tmp_path


def test_classes_are_the_sorted_folders_and_files_are_sorted_too(root: Path) -> None:
    data = image_folder.build(str(root), size=8)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (3, 3, 2, (3, 8, 8))
    assert [target for _, target in (data.train[index] for index in range(3))] == [0, 1, 1]
    assert data.class_names == ("blue", "red")
    assert data.train[0][0].mean((1, 2)).tolist() == [0.0, 0.0, 1.0]
    assert data.train[1][0].mean((1, 2)).tolist() == [1.0, 0.0, 0.0]
    ((inputs, targets),) = batches(data.test, batch_size=3, seed=0, epoch=0, shuffle=False)
    assert inputs.shape == (3, 3, 8, 8) and targets.tolist() == [0, 1, 1]


@pytest.mark.parametrize("size", [(30, 10), (10, 30)])
def test_the_center_is_cropped_without_stretching(root: Path, size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, RED)
    middle = ((size[0] - 10) // 2, (size[1] - 10) // 2)
    image.paste(BLUE, (*middle, middle[0] + 10, middle[1] + 10))
    image.save(root / "train" / "blue" / "1.png")
    shown, _ = image_folder.build(str(root), size=5).train[0]
    assert torch.equal(shown, torch.tensor([0.0, 0.0, 1.0]).view(3, 1, 1).expand(3, 5, 5))


def test_grey_and_palette_images_become_color(root: Path) -> None:
    Image.new("L", (12, 12), 255).save(root / "train" / "blue" / "1.png")
    Image.new("P", (12, 12)).save(root / "train" / "blue" / "2.png")
    data = image_folder.build(str(root), size=None)
    assert data.train[0][0].shape == data.train[1][0].shape == (3, 12, 12)


@pytest.mark.parametrize("length", [0, 4, 45])
def test_a_broken_image_is_named_with_its_index(root: Path, length: int) -> None:
    path = root / "train" / "red" / "1.png"
    path.write_bytes(path.read_bytes()[:length])
    data = image_folder.build(str(root), size=8)
    with pytest.raises(DataError, match=r"sample 1: .*train/red/1\.png: not a readable image"):
        list(batches(data.train, batch_size=3, seed=0, epoch=0, shuffle=False))


def test_only_files_of_a_sensible_size_are_images(root: Path) -> None:
    """A named pipe called 1.png was waited for."""
    first, second, third = (root / "train" / "red" / f"{name}.png" for name in ("1", "3", "4"))
    first.unlink()
    os.mkfifo(first)
    second.mkdir()
    with third.open("wb") as file:
        file.truncate(2**40)
    data = image_folder.build(str(root), size=8)
    for index, message in ((1, "is a named pipe"), (2, "is a directory"), (3, "has 1,099,511,627,776 bytes")):
        with pytest.raises(DataError, match=f"not a readable image \\({message}"):
            data.train[index]


def test_images_of_different_sizes_need_a_size(root: Path) -> None:
    save(root / "train" / "red" / "1.png", RED, size=(9, 9))
    data = image_folder.build(str(root), size=None)
    with pytest.raises(DataError, match=r"sample 1: has the shape \[3, 9, 9\].*set data\.size"):
        list(batches(data.train, batch_size=3, seed=0, epoch=0, shuffle=False))


def test_folders_of_classes_without_train_are_all_to_train_on(tmp_path: Path) -> None:
    for name in ("owl", "cat"):
        save(tmp_path / name / "1.png", RED)
    (tmp_path / ".cache").mkdir()
    data = image_folder.build(path=str(tmp_path), size=8)
    assert (len(data.train), data.test, data.class_names) == (2, None, ("cat", "owl"))
    (tmp_path / "notes").mkdir()
    with pytest.raises(DataError, match=r"data\.path=.*: its folder notes has no images; move"):
        image_folder.build(path=str(tmp_path))
    (tmp_path / "notes").rename(tmp_path / "test")
    with pytest.raises(DataError, match="/train is missing; put a folder of images per class there"):
        image_folder.build(str(tmp_path))


def test_a_train_folder_alone_leaves_the_split_to_validation(root: Path) -> None:
    (root / "val").rename(root / "elsewhere")
    assert image_folder.build(str(root), size=8).test is None


def test_images_without_class_folders_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "cat-1.png", RED)
    with pytest.raises(
        DataError, match="has 1 images but no folders; put the images of each class into a folder"
    ):
        image_folder.build(str(tmp_path))


def test_missing_and_empty_folders_say_what_to_put_there(tmp_path: Path, root: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.root=nowhere: is not a folder; put a folder of images per class"
    ):
        image_folder.build("nowhere")
    (tmp_path / "other" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="has no folders; put a folder of images per class"):
        image_folder.build(str(tmp_path / "other"))
    (tmp_path / "other" / "train" / "cat").mkdir()
    with pytest.raises(DataError, match=r"other/train: no images \(\.bmp, "):
        image_folder.build(str(tmp_path / "other"))
    save(root / "val" / "green" / "1.png", BLUE)
    with pytest.raises(DataError, match="val: green: not a class under train"):
        image_folder.build(str(root))
