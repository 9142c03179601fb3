from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from gpipe_cli.config.keys import list_options
from tests.support.command_line import Gpipe


@pytest.mark.parametrize(
    ("what", "where"),
    [("recipe/digits", "own/recipes/mine.yaml"), ("models/resnet18", "own/model/mine.yaml")],
)
def test_a_copy_can_be_used_with_the_printed_command(what: str, where: str, gpipe: Gpipe) -> None:
    answer = gpipe("cp", what, where, "--json")
    assert answer.code == 0, answer.err
    group, name = answer.json["from"].split("/")
    (source,) = (option.path for option in list_options(group) if option.name == name)
    assert Path(where).read_bytes() == source.read_bytes()
    shown = gpipe(*shlex.split(answer.json["use"])[1:], "--cfg", "job")
    assert shown.code == 0 and "name: resnet18" in shown.out


@pytest.mark.parametrize("recipe", ["digits", "unet_shapes", "hf_lora"])
def test_a_recipe_that_was_copied_is_a_file_of_keys_too(gpipe: Gpipe, recipe: str) -> None:
    """`gpipe cp recipe/digits mine.yaml`, then `config=mine.yaml`, was refused for its list of defaults."""
    answer = gpipe("cp", f"recipe/{recipe}", "mine.yaml", "--json")
    assert answer.json["use"] == "gpipe train config=mine.yaml"
    composed = [gpipe("train", "--cfg", "job", word).out for word in ("config=mine.yaml", f"recipe={recipe}")]
    assert composed[0] == composed[1] and "lr_schedule" in composed[0]


def test_a_folder_gets_a_file_of_the_same_name(gpipe: Gpipe) -> None:
    Path("here").mkdir()
    out = gpipe("cp", "optimizer/sgd", "here").out.splitlines()
    assert out[:2] == ["from  optimizer/sgd", "to    here/sgd.yaml"]
    assert out[2] == "use   put it into a folder optimizer/, and give the folder above it as --config-dir"


def test_cp_never_replaces_a_file(gpipe: Gpipe) -> None:
    Path("mine.yaml").write_text("mine", encoding="utf-8")
    answer = gpipe("cp", "model/mlp", "mine.yaml")
    assert answer.code == 2 and "mine.yaml: exists; give another name" in answer.err
    assert Path("mine.yaml").read_text(encoding="utf-8") == "mine"


def test_a_file_cannot_be_put_below_a_file(gpipe: Gpipe) -> None:
    Path("file").write_text("", encoding="utf-8")
    assert gpipe("cp", "model/mlp", "file/mine.yaml").code in (2, 6)


def test_the_settings_of_a_run_become_a_file_that_repeats_it(gpipe: Gpipe, tiny_run: Path) -> None:
    saved = tiny_run.rename("first") / "config.yaml"
    text = re.sub(r"(?m)^  lr: .*$", "  lr: 0.5", saved.read_text())
    saved.write_text(re.sub(r"(?m)^run_dir: run$", "run_dir: first", text))
    answer = gpipe("cp", "run/first", "my.yaml", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["use"] == "gpipe train config=my.yaml 'allow=[tiny_for_tests]'"
    text = Path("my.yaml").read_text()
    assert text.startswith("# The settings of first; use them with: gpipe train config=my.yaml")
    assert (
        "optimizer:\n  option: adamw\n  lr: 0.5\n" in text and "run_dir" not in text and "allow:" not in text
    )
    answer = gpipe("cp", "first", "my.yaml")  # its path alone will do
    assert answer.code == 2 and "my.yaml: exists" in answer.err
    composed = yaml.safe_load(gpipe("train", "--cfg", "job", "config=my.yaml").out)
    repeated = {**composed, "run_dir": "first", "allow": ["tiny_for_tests"]}
    assert repeated == yaml.safe_load(saved.read_text())


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("run/nowhere", "run/nowhere: not a run directory: it has no config.yaml"),
        ("run/odd", "odd/config.yaml: not the configuration of a run"),
    ],
)
def test_a_directory_that_is_no_run_is_refused(gpipe: Gpipe, run: str, message: str) -> None:
    Path("odd").mkdir()
    Path("odd", "config.yaml").write_text("model: resnet18\n")
    answer = gpipe("cp", run, "my.yaml")
    assert answer.code == 4 and message in answer.err
    assert not Path("my.yaml").exists()
