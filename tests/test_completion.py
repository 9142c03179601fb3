from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpipe_cli
from gpipe_cli.completion import complete
from gpipe_cli.config.keys import list_options
from gpipe_cli.errors import ConfigError
from gpipe_cli.help import COMMANDS

ROOT = str(Path(gpipe_cli.__file__).parents[1])


def nothing(command: str, words: list[str]) -> None:
    raise AssertionError("Hydra is not asked")


def completed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    complete(["query=bash"], nothing)
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gpipe", [*COMMANDS, "--help", "--version"]),
        ("gpipe ", [*COMMANDS, "--help", "--version"]),
        ("gpipe tr", ["train"]),
        ("/opt/train/gpipe tr", ["train"]),
        ("gpipe zz", []),
        ("gpipe zz ", []),
        ("gpipe ls mo", ["model", "models"]),
        ("gpipe ls models rec", ["recipe", "recipes"]),
        ("gpipe cp recipes/dig", ["recipes/digits"]),
        ("gpipe cp recipes/digits ", []),
        ("gpipe cp ru", ["run/"]),
        ("gpipe cp run/fir", ["run/first/"]),
        ("gpipe runs --w", ["--watch"]),
        ("gpipe train --w", []),
        ("gpipe report ", []),
        ("gpipe report ou", ["out="]),
        ("gpipe export sn", ["snapshot="]),
        ("gpipe train config=", ["config=first/", "config=my.yaml"]),
        ("gpipe train chunks=8 config=m", ["config=my.yaml"]),
        ("gpipe eval run=", ["run=first/"]),
        ("gpipe eval snapshot=first/s", ["snapshot=first/snapshots/"]),
        ("gpipe train resume=first", ["resume=first/"]),
        ("gpipe train model.weights=", ["model.weights=first/", "model.weights=w.safetensors"]),
        ("gpipe export out=w", ["out=w.safetensors"]),
        ("gpipe train config=nowhere/", []),
        ("gpipe train config=~nobody-of-that-name/", []),
        ("gpipe train --js", ["--json"]),
        ("gpipe train chunks=8 --dr", ["--dry-run"]),
        ("gpipe env --d", ["--debug"]),
        ("gpipe env ", []),
        ("gpipe train recipe=unet_speed recipe.sc", ["recipe.scale=full", "recipe.scale=small"]),
    ],
)
def test_commands_flags_topics_and_paths_are_completed_without_hydra(
    line: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first" / "snapshots").mkdir(parents=True)
    for name in ("my.yaml", "w.safetensors", ".hidden.yaml", "a b.yaml", "$(touch evil).yaml", "`x`;.yaml"):
        (tmp_path / name).touch()
    assert completed(line, monkeypatch, capsys) == words


def test_completion_is_silent_when_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(command: str, words: list[str]) -> None:
        sys.stderr.write("a word of Hydra")
        raise RuntimeError("broken")

    monkeypatch.setenv("COMP_LINE", "gpipe train model=nope opti")
    monkeypatch.setenv("COMP_POINT", "0")
    complete(["query=bash"], failing)
    assert capsys.readouterr() == ("\n", "")


def test_hydra_gets_the_words_of_a_file_and_no_bare_word_and_fish_a_line_for_each_candidate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("{optimizer: sgd, recipe: digits}")
    asked = []

    def answering(command: str, words: list[str]) -> None:
        asked.append(os.environ["COMP_LINE"])
        sys.stdout.write("chunks= checkpoint= hydra.run=")

    monkeypatch.setenv("COMP_LINE", "gpipe train bare --json config=my.yaml seed=3 c")
    monkeypatch.setenv("COMP_POINT", "0")
    complete(["query=fish"], answering)
    assert asked == ["gpipe optimizer=sgd recipes=digits seed=3 c"]
    assert capsys.readouterr().out == "chunks=\ncheckpoint=\nconfig=\n"


@pytest.mark.parametrize("words", [[], ["install=nosh"], ["frobnicate=bash"], ["query=bash", "x"]])
def test_what_is_no_completion_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"-sc .*: choose one of: install=bash"):
        complete(words, nothing)


def completions(line: str) -> list[str]:
    """What a shell would get."""
    done = subprocess.run(
        [sys.executable, "-m", "gpipe_cli", "-sc", "query=bash"],
        env={**os.environ, "PYTHONPATH": ROOT, "COMP_LINE": line, "COMP_POINT": str(len(line))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.slow
def test_keys_and_options_are_those_of_the_command() -> None:
    assert completions("gpipe train --json model=resnet1") == [
        "model=resnet101",
        "model=resnet152",
        "model=resnet18",
    ]
    assert completions("gpipe train recipe=") == [
        f"recipe={option.name}" for option in list_options("recipes")
    ]
    keys = completions("gpipe train ")
    assert {"chunks=", "model=", "recipe=", "seed="} <= set(keys)
    assert not any(word.startswith(("hydra", "tests", "gpipe_cli", "conf=", "conf/", ".")) for word in keys)
    assert "split=" in completions("gpipe eval spl")
    keys = completions("gpipe generate ")
    assert {"run=", "prompt=", "partitions="} <= set(keys) and not {"batch_size=", "loss="} & set(keys)


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash")
def test_what_is_installed_is_valid_bash() -> None:
    command = [sys.executable, "-m", "gpipe_cli", "-sc", "install=bash"]
    script = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, check=True
    ).stdout
    assert "complete" in script
    subprocess.run(["/bin/bash", "-n"], input=script, text=True, check=True)
