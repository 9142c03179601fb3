"""gpipe predict: what it reads, what it prints and writes, and that an exported file needs nothing else."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from gpipe_cli.data.datasets import Samples
from gpipe_cli.data.generated import build_shapes
from gpipe_cli.data.images import build_digits
from gpipe_cli.inference.trained import TrainedModel
from tests.support.command_line import Gpipe, UserModule
from tests.support.trained_runs import TrainedRun


def save_images(samples: Samples, folder: Path, count: int, size: tuple[int, int] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        input, _ = samples[index]
        assert isinstance(input, torch.Tensor)
        image = Image.fromarray((input * 255).round().byte().permute(1, 2, 0).numpy())
        (image if size is None else image.resize(size)).save(folder / f"{index}.png")


@pytest.fixture
def trained(gpipe: Gpipe, trained_run: TrainedRun, tmp_path: Path) -> Path:
    """A folder with a run, its exported weights and images."""
    trained_run("digits")
    assert gpipe("export", "run=run", "out=model.safetensors").code == 0
    save_images(build_digits(size=8).test, tmp_path / "images", 3)
    save_images(build_digits(size=8).test, tmp_path / "images" / "below", 2, (20, 12))
    return tmp_path


@pytest.fixture
def predict(gpipe: Gpipe, trained: Path) -> Gpipe:
    return lambda *words: gpipe("predict", *(word.replace("@", f"{trained}/") for word in words))


def test_a_file_of_weights_predicts_what_its_run_predicts_and_needs_nothing_else(
    predict: Gpipe, trained: Path
) -> None:
    answer = predict("run=@run", "input=@images", "--json")
    assert answer.code == 0 and answer.err.startswith("best: eval loss "), answer.err
    rows = answer.json["predictions"]
    assert [row["file"].removeprefix(f"{trained}/") for row in rows] == [
        *(f"images/{index}.png" for index in range(3)),
        *(f"images/below/{index}.png" for index in range(2)),
    ]
    for row in rows:
        assert [set(entry) for entry in row["classes"]] == [{"class", "index", "probability"}] * 3
        assert all(entry["class"] == str(entry["index"]) for entry in row["classes"])
        probabilities = [entry["probability"] for entry in row["classes"]]
        assert probabilities == sorted(probabilities, reverse=True) and 0 < sum(probabilities) <= 1.00001
    alone = predict("weights=@model.safetensors", "input=@images", "threads=1", "--json")
    assert alone.json["predictions"] == rows and alone.err == ""
    for words in (["partitions=1"], ["engine=single"], ["engine=offload", "engine.slices=2"]):
        assert predict("run=@run", "input=@images", *words, "--json").json["predictions"] == rows, words


def test_ten_lines_of_plain_pytorch_predict_the_same_to_the_bit(predict: Gpipe, trained: Path) -> None:
    row = predict("weights=@model.safetensors", "input=@images/below/1.png", "top=10", "--json").json[
        "predictions"
    ][0]
    spec = json.loads((trained / "model.json").read_text())
    hidden = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.ReLU())
    model = torch.nn.Sequential(OrderedDict(hidden0=hidden, head=torch.nn.Linear(16, spec["classes"])))
    model.load_state_dict(load_file(trained / "model.safetensors"))
    image = Image.open(trained / "images" / "below" / "1.png").convert("RGB")
    pixels = torch.tensor(list(image.tobytes())).view(image.height, image.width, 3).permute(2, 0, 1) / 255
    middle = pixels[None, :, :, 4:16]  # of 20 columns and 12 rows
    input = torch.nn.functional.interpolate(middle, spec["shape"][1:], mode="bilinear", antialias=True)
    mean, std = (torch.tensor(spec[key]).view(-1, 1, 1) for key in ("mean", "std"))
    probabilities = model((input - mean) / std).softmax(1)[0].tolist()
    assert {entry["index"]: entry["probability"] for entry in row["classes"]} == dict(
        enumerate(probabilities)
    )


def test_a_pipe_and_a_file_get_csv(predict: Gpipe, tmp_path: Path) -> None:
    answer = predict("run=@run", "input=[@images/0.png,@images/below]", "top=2")
    rows = list(csv.DictReader(io.StringIO(answer.out)))
    assert list(rows[0]) == ["file", "class", "probability", "class_2", "probability_2"] and len(rows) == 3
    written = predict("run=@run", "input=[@images/0.png,@images/below]", "top=2", "out=new/rows.csv")
    assert written.out == "" and written.err.endswith("3 predictions in new/rows.csv\n")
    assert (tmp_path / "new/rows.csv").read_text() == answer.out
    assert len(predict("run=@run", "input=@images/*.png", "top=99").out.splitlines()) == 4


def test_a_terminal_gets_a_table(predict: Gpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "300")
    answer = predict("run=@run", "input=@images/0.png")
    assert "1 prediction" in answer.out and "probability" in answer.out and answer.out.count(" %") == 3


def test_files_that_are_no_images_are_named_and_the_others_predicted(
    predict: Gpipe, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mixed"
    save_images(build_digits(size=8).test, folder, 1)
    whole = (folder / "0.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:50])
    (folder / "text.jpg").write_text("no image")
    (folder / "eps.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    (folder / "empty.png").touch()
    (folder / "notes.txt").write_text("neither read nor named")
    os.mkfifo(folder / "pipe.png")
    (folder / "nowhere.png").symlink_to("nothing")
    (folder / "circle").symlink_to(folder)
    (folder / "folder.png").mkdir()
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "I;16"):
        Image.new(mode, (5, 9)).save(folder / f"{mode.replace(';', '')}.tiff")
    answer = predict("run=@run", f"input={folder}", "--json")
    assert answer.code == 3 and answer.err.endswith(
        "gpipe: error: 6 of 14 inputs could not be read; the lines above name them\n"
    )
    assert {Path(row["file"]).name for row in answer.json["failed"]} == {
        "cut.png", "text.jpg", "eps.png", "empty.png", "pipe.png", "nowhere.png",
    }  # fmt: skip
    assert len(answer.json["predictions"]) == 8 and answer.err.count("\nskipped ") == 6
    assert (
        f"skipped {folder}/pipe.png: not a readable image (is a named pipe, not a regular file)\n"
        in answer.err
    )


def test_an_image_of_far_too_many_pixels_is_not_decoded(
    predict: Gpipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 99)
    Image.new("L", (10, 10)).save(tmp_path / "bomb.png")
    answer = predict("run=@run", "input=bomb.png")
    assert (answer.code, answer.out) == (3, "") and "exceeds limit of 99 pixels" in answer.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run=@run"], 2, "input: give the images to predict, input=<folder>"),
        (["run=@run", "input=[]"], 2, "input: give the images to predict"),
        (["run=@run", "input={a: b}"], 2, "input={'a': 'b'}: must be a path or a list of paths"),
        (["run=@run", "input=nowhere"], 3, "input=nowhere: no such file or folder"),
        (["run=@run", "input=/tm?"], 3, "input=/tm?: no such file; the pattern matches only folders"),
        (["run=@run", "input=@run"], 3, "run: no images (.bmp, "),
        (["run=@run", "input=@images", "top=0"], 2, "top=0: must be at least 1"),
        (["run=@run", "input=@images", "out=a.json"], 2, "out=a.json: gpipe writes predictions as CSV"),
        (["run=@run", "input=@images", "out=@images"], 2, "images: exists; give another name"),
        (["run=@run", "input=@images", "data.size=4"], 2, "data.size=4: has no effect, because how to prepare"),
        (["run=@run", "input=@images", "data_parallel=2"], 2, "data_parallel: has no effect on gpipe predict"),
        (["weights=nowhere.safetensors", "input=@images"], 4, "weights=nowhere.safetensors: no such file"),
        (["weights=@images/0.png", "input=@images"], 2, "unknown file type"),
        (["input=@images"], 2, "run: give the run to use"),
    ],
)  # fmt: skip
def test_bad_input_is_answered_in_one_line(predict: Gpipe, words: list[str], code: int, message: str) -> None:
    answer = predict(*words)
    assert answer.code == code and message in answer.err.splitlines()[-1], answer.err
    assert len(answer.err.splitlines()) <= 2 and answer.out == ""


@pytest.mark.slow
def test_a_segmentation_writes_masks_of_the_size_of_the_images(
    gpipe: Gpipe, trained_run: TrainedRun, tmp_path: Path
) -> None:
    trained_run("unet")
    save_images(build_shapes(size=16).test, tmp_path / "images" / "below", 2, (30, 20))
    Image.open(tmp_path / "images/below/0.png").save(tmp_path / "images/below/0.bmp")
    answer = gpipe("predict", "run=run", "input=images")
    assert answer.code == 2 and "out: give out=<folder>, a new folder for the masks" in answer.err
    answer = gpipe("predict", "run=run", "input=images", "out=masks", "top=9", "--json")
    rows = answer.json["predictions"]
    assert [row["mask"] for row in rows] == [f"masks/below/{name}.png" for name in ("0", "0.png", "1")]
    for row in rows:
        mask = Image.open(tmp_path / row["mask"])
        assert (mask.mode, mask.size) == ("P", (30, 20)) and mask.getpalette()[:6] == [0, 0, 0, 128, 0, 0]  # type: ignore[index]
        assert {entry["index"] for entry in row["classes"]} >= set(mask.tobytes())
        assert sum(entry["share"] for entry in row["classes"]) == pytest.approx(1)
        assert {entry["class"] for entry in row["classes"]} <= {"background", "disc", "square", "triangle"}


@pytest.fixture
def regression(user_module: UserModule) -> str:
    user_module(
        "brightness_for_tests",
        "import torch\n"
        "from gpipe_cli.data.datasets import Data\n\n"
        "class Samples:\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index):\n"
        "        return torch.full((1, 4, 4), index / 8), torch.tensor([index / 8, 1.0])\n\n"
        "def build():\n"
        "    return Data(Samples(), Samples(), classes=2, shape=(1, 4, 4))\n",
    )
    return "brightness_for_tests"


def test_a_regression_on_grey_images_prints_numbers(gpipe: Gpipe, tmp_path: Path, regression: str) -> None:
    words = (
        "model=mlp",
        "model.width=4",
        "model.depth=1",
        "loss=mse",
        f"data._target_={regression}.build",
        f"allow=[{regression}]",
    )
    assert gpipe("train", *words, "batch_size=4", "steps=1", "threads=1", "run_dir=run").code == 0
    Image.new("RGB", (8, 8), (255, 128, 0)).save(tmp_path / "a.png")
    answer = gpipe("predict", "run=run", "input=a.png")  # the data is not built, so nothing has to be allowed
    assert answer.code == 0 and answer.out.splitlines()[0] == "file,prediction_1,prediction_2", answer.err


def test_a_run_of_an_older_gpipe_predicts_with_its_data(
    predict: Gpipe, trained: Path, tmp_path: Path, gpipe: Gpipe
) -> None:
    expected = predict("run=@run", "input=@images", "--json").json["predictions"]
    (trained / "run").rename(tmp_path / "old")
    (tmp_path / "old/inference.json").unlink()
    assert predict("run=old", "input=@images", "--json").json["predictions"] == expected
    exported = gpipe("export", "run=old", "out=old.safetensors", "--json")
    assert "old: has no inference.json, because an older gpipe trained it" in exported.err
    assert "description" not in exported.json and not (tmp_path / "old.json").exists()
    model = ("model=mlp", "model.width=16", "model.depth=1", "data=digits", "data.size=8", "threads=1")
    assert (
        predict("weights=old.safetensors", *model, "input=@images", "--json").json["predictions"] == expected
    )


def test_text_is_left_to_generate(
    gpipe: Gpipe, trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is built: a Llama that was traced with an image raised an error about its embedding."""
    trained_run("gpt")
    monkeypatch.setattr(TrainedModel, "build", None)
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    answer = gpipe("predict", "run=run", "input=a.png")
    assert (
        answer.code == 2
        and "the inputs of this model (shape 8) are none; for text use gpipe generate" in answer.err
    )


def test_a_run_on_a_table_says_that_tables_were_removed(gpipe: Gpipe, trained: Path, tmp_path: Path) -> None:
    (trained / "run").rename(tmp_path / "old")
    config = tmp_path / "old/config.yaml"
    text = config.read_text()
    assert text.count("gpipe_cli.data.images.build_digits") == 1
    config.write_text(text.replace("gpipe_cli.data.images.build_digits", "gpipe_cli.data.csv_table.build"))
    spec = tmp_path / "old/inference.json"
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "feature_names": ["width", "height"]}))
    for words in (["train", "resume=old"], ["eval", "run=old"], ["predict", "run=old", "input=old"]):
        answer = gpipe(*words)
        assert answer.code == 2 and answer.err.count("\n") == 1, answer.err
        assert "data=csv and predictions for tables were removed from gpipe; read the rows" in answer.err
