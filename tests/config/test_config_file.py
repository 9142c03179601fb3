from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpipe_cli.config.config_file import split_config_file
from gpipe_cli.errors import ConfigError

Gpipe = Callable[..., Any]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def words(text: str, *others: str, command: str = "train") -> tuple[str, ...]:
    Path("my.yaml").write_text(text)
    file, rest = split_config_file(command, ["config=my.yaml", *others])
    assert file is not None and rest == list(others)
    return file.words


def test_a_key_of_the_command_line_takes_the_place_of_the_files() -> None:
    text = "{epochs: 3, optimizer: {option: sgd, lr: 0.1}, log: {every: 2, layers: true}}"
    assert words(text, "epochs=5", "optimizer.lr=1", "+log.every=1") == ("optimizer=sgd", "log.layers=true")
    assert words(text, "~log") == ("epochs=3", "optimizer=sgd", "optimizer.lr=0.1")


@pytest.mark.parametrize("given", ["optimizer=adamw", "optimizer._target_=torch.optim.Adam"])
def test_an_option_of_the_command_line_replaces_the_whole_group_and_says_so(given: str) -> None:
    Path("my.yaml").write_text("{epochs: 3, optimizer: {option: sgd, lr: 0.1}}")
    file, _ = split_config_file("train", ["config=my.yaml", given])
    assert file is not None
    assert file.words == ("epochs=3",)
    assert file.notes == (f"my.yaml: {given} replaces its keys optimizer.lr",)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("config=", "config: give config=<file>"),
        ("config=mi.yaml", "config=mi.yaml: no such file; did you mean 'my.yaml'?"),
        ("config=elsewhere/my.yaml", "config=elsewhere/my.yaml: no such file"),
        ("config=run", "config=run: is a directory; give config=run/config.yaml"),
        ("config=pipe.yaml", "pipe.yaml: is a named pipe, not a regular file"),
        ("config=link.yaml", "link.yaml: is a device, not a regular file"),
        ("config=large.yaml", "large.yaml: has 200,000 bytes; gpipe reads at most 131,072"),
        ("config=bomb.yaml", "bomb.yaml:5: holds more than 5,000 values, its aliases replaced"),
        ("config=tag.yaml", "tag.yaml:1:9: could not determine a constructor for the tag"),
        ("config=twice.yaml", "twice.yaml:2:1: found duplicate key epochs"),
        ("config=list.yaml", "list.yaml: its top level must be a mapping of keys"),
        ("config=typo.yaml", "typo.yaml: unknown key 'epoch'; did you mean 'epochs'?"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(word: str, message: str) -> None:
    Path("run").mkdir()
    Path("run", "config.yaml").touch()
    os.mkfifo("pipe.yaml")
    Path("link.yaml").symlink_to("/dev/zero")
    bomb = "\n".join(f"k{n}: &k{n} [{','.join([f'*k{n - 1}'] * 9)}]" for n in range(1, 9))
    for name, text in {
        "my": "epochs: 3",
        "large": "x" * 200_000,
        "bomb": f"k0: &k0 [1, 2, 3]\n{bomb}",
        "tag": "epochs: !!python/object/apply:os.system [ls]",
        "twice": "epochs: 1\nepochs: 2",
        "list": "- epochs",
        "typo": "epoch: 1",
    }.items():
        Path(f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        split_config_file("train", [word])
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_two_files_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"config: given 2 times \(a, b\); give one file"):
        split_config_file("train", ["config=a", "config=b"])


def test_a_file_may_not_name_code_that_the_command_line_does_not_allow(gpipe: Gpipe) -> None:
    Path("my.yaml").write_text("{model: {_target_: os.system, command: ls}, allow: [os]}")
    answer = gpipe("train", "config=my.yaml")
    assert answer.code == 2
    assert answer.err.startswith("gpipe: error: my.yaml: model._target_=os.system: not allowed here")
    assert answer.err.count("\n") == 1


def test_a_file_a_recipe_and_a_command_line_are_composed_in_this_order(gpipe: Gpipe) -> None:
    Path("my.yaml").write_text("{recipe: digits, epochs: 7, batch_size: 10, chunks: 5}")
    composed = yaml.safe_load(gpipe("train", "--cfg", "job", "batch_size=20", "config=my.yaml").out)
    assert composed["balance"]["_target_"] == "gpipe_cli.balance.time.balance"
    assert (composed["epochs"], composed["batch_size"], composed["chunks"]) == (7, 20, 5)


def test_a_sweep_over_a_file_trains_each_value_and_prints_lines_that_repeat_its_jobs(tiny: Gpipe) -> None:
    Path("my.yaml").write_text("{steps: 1, optimizer: {option: sgd, lr: 0.5}, run_dir: sweep}")
    answer = tiny("train", "-m", "config=my.yaml", "optimizer.lr=0.1,0.2", "--json")
    assert answer.code == 0, answer.err
    assert [row["command"].split()[-1] for row in answer.json] == ["optimizer.lr=0.1", "optimizer.lr=0.2"]
    assert all("optimizer=sgd" in row["command"] for row in answer.json)
    assert {"0", "1"} <= {path.name for path in Path("sweep").iterdir()}


def test_the_configuration_of_a_run_repeats_it_to_the_bit(tiny: Gpipe) -> None:
    words = ("steps=2", "optimizer=sgd", "optimizer.lr=0.3", "partitions=2", "model.width=5")
    first = tiny("train", *words, "run_dir=first", "--json").json
    # Not `tiny`, which would add the same words again.
    from gpipe_cli.cli import main

    assert main(["train", "config=first/config.yaml", "allow=[tiny_for_tests]", "run_dir=again"]) == 0
    again = yaml.safe_load(Path("again", "summary.json").read_text())
    assert again["loss"] == first["loss"]
    name = Path("snapshots", "step-00000002", "model.safetensors")
    assert (Path("again") / name).read_bytes() == (Path("first") / name).read_bytes()
    saved = [yaml.safe_load(Path(run, "config.yaml").read_text()) for run in ("first", "again")]
    assert {**saved[0], "run_dir": None} == {**saved[1], "run_dir": None}
