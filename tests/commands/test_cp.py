from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.config.options import list_options

Gpipe = Callable[..., Any]


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
