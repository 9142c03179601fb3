from __future__ import annotations

import os
import pty
import resource
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gpipe_cli
from gpipe_cli import completion
from gpipe_cli.completion import complete
from gpipe_cli.config.keys import key_table, list_options
from gpipe_cli.config.schema import SCHEMAS
from gpipe_cli.errors import ConfigError
from gpipe_cli.help import COMMANDS

ROOT = str(Path(gpipe_cli.__file__).parents[1])
SHELLS = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}


def completed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    complete(["query=bash"])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gpipe", [*COMMANDS, "--help", "--version"]),
        ("gpipe ", [*COMMANDS, "--help", "--version"]),
        ("gpipe tr", ["train"]),
        ("/opt/train/gpipe tr", ["train"]),
        ("  gpipe   train  --js", ["--json"]),
        ("gpipe zz", []),
        ("gpipe zz ", []),
        ("gpipe ls mo", ["model", "models"]),
        ("gpipe ls models rec", ["recipe", "recipes"]),
        ("gpipe cp recipes/dig", ["recipes/digits"]),
        ("gpipe cp recipe/dig", ["recipe/digits"]),
        ("gpipe cp recipes/digits ", []),
        ("gpipe cp ru", ["run/"]),
        ("gpipe launch-script s", ["slurm"]),
        ("gpipe runs --w", ["--watch"]),
        ("gpipe train --w", []),
        ("gpipe balance --dr", []),
        ("gpipe report ", []),
        ("gpipe report ou", ["out="]),
        ("gpipe export sn", ["snapshot="]),
        ("gpipe export format=", ["format=safetensors", "format=hf", "format=peft"]),
        ("gpipe launch-script slurm no", ["nodes="]),
        ("gpipe launch-script slurm model=hf model.pa", ["model.path="]),
        ("gpipe runs watch=", ["watch=true", "watch=false"]),
        ("gpipe runs hydra", []),
        ("gpipe launch-script slurm hydra", []),
        ("gpipe train config=", []),
        ("gpipe train --js", ["--json"]),
        ("gpipe train chunks=8 --dr", ["--dry-run"]),
        ("gpipe env --d", ["--debug"]),
        ("gpipe env ", []),
        ("gpipe train recipe=unet_speed recipe.sc", ["recipe.scale="]),
        ("gpipe train recipe.scale=", ["recipe.scale=full", "recipe.scale=small"]),
        ("gpipe eval recipe", []),
        ("gpipe train --json model=resnet1", ["model=resnet101", "model=resnet152", "model=resnet18"]),
        ("gpipe train recipe=", [f"recipe={option.name}" for option in list_options("recipes")]),
        ("gpipe train schedule=1", ["schedule=1f1b"]),
        ("gpipe train model.lo", []),
        (
            "gpipe train model=hf model.lora.",
            [f"model.lora.{key}=" for key in ("rank", "targets", "alpha", "dropout")],
        ),
        ("gpipe train recipe=hf_lora model.pa", ["model.path="]),
        ("gpipe train config=my.yaml model.pa", ["model.path="]),
        ("gpipe train engine=offload part", []),
        ("gpipe train engine=offload engine.p", ["engine.prefetch="]),
        ("gpipe train engine=offload engine.prefetch=", ["engine.prefetch=true", "engine.prefetch=false"]),
        ("gpipe train log.layers=t", ["log.layers=true"]),
        ("gpipe train precision=", ["precision=fp32", "precision=bf16", "precision=fp16"]),
        ("gpipe eval which=", ["which=best", "which=last"]),
        ("gpipe train chunks=", []),
        ("gpipe train hydra/l", ["hydra/launcher="]),
        ("gpipe train hydra/launcher=s", ["hydra/launcher=submitit_local", "hydra/launcher=submitit_slurm"]),
        ("gpipe train hydra/sweeper=", ["hydra/sweeper=basic", "hydra/sweeper=optuna"]),
        ("gpipe generate batch", []),
    ],
)
def test_the_last_word_of_a_line_is_completed(
    line: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("model: hf\n")
    assert completed(line, monkeypatch, capsys) == words


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_key_of_the_help_is_completed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for start in "cdmrst":
        keys = [f"{key}=" for key in key_table(command) if key.startswith(start)]
        assert completed(f"gpipe {command} word {start}", monkeypatch, capsys) == keys


def test_completion_is_silent_when_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: str, words: list[str]) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(completion, "key_table", fail)
    assert completed("gpipe train opti", monkeypatch, capsys) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [[], ["install=nosh"], ["frobnicate=bash"], ["query=bash", "x"]])
def test_what_is_no_completion_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"-sc .*: choose one of: install=bash"):
        complete(words)


def test_a_tab_imports_neither_hydra_nor_torch_and_takes_little_time() -> None:
    code = (
        "import sys; from gpipe_cli.cli import main; main(['-sc', 'query=bash'])\n"
        "found = {'hydra', 'omegaconf', 'torch', 'yaml', 'rich'} & set(sys.modules); assert not found, found"
    )
    line = "gpipe train recipe=hf_lora model."
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": ROOT, "COMP_LINE": line},
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "model.lora.rank=" in done.stdout.splitlines() and done.stderr == ""
    # It takes 0.15 s of CPU time, and may take 0.3; a machine that does other things needs up to twice as much.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.6


@pytest.fixture
def path_with_gpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `gpipe` first in PATH that is this checkout, and an empty current folder but for one run."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gpipe"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m gpipe_cli "$@"\n')
    program.chmod(0o755)
    (tmp_path / "work" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("PS1", "> ")
    for name in ("EDITOR", "VISUAL"):  # zsh takes the keys of vi if one of them names it
        monkeypatch.delenv(name, raising=False)


@contextmanager
def interactive(shell: str) -> Iterator[int]:
    """A shell on a terminal of its own; yields the terminal."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvp(shell, [shell, *SHELLS[shell]])
    try:
        yield terminal
    finally:
        os.close(terminal)  # the shell ends, since its terminal is gone
        os.waitpid(child, 0)


def type_into(terminal: int, keys: str, expected: str) -> None:
    """Type the keys, and wait for the text on the screen."""
    os.write(terminal, keys.encode())
    screen, deadline = "", time.monotonic() + 30
    while expected not in screen:
        assert time.monotonic() < deadline, screen
        if select.select([terminal], [], [], 0.1)[0]:
            screen += os.read(terminal, 4096).decode().replace("\a", "")  # zsh rings a bell


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.usefixtures("path_with_gpipe")
def test_the_tab_key_completes_in_a_shell(shell: str) -> None:
    """Bash breaks words at `=`, and replaced `resnet10` by `model=resnet101`, so that it was there twice."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    prepare = "autoload -Uz compinit && compinit -u; " if shell == "zsh" else ""
    with interactive(shell) as terminal:
        type_into(
            terminal, f'{prepare}eval "$(gpipe -sc install={shell})"; echo in"stalled"\n', "\ninstalled"
        )
        type_into(terminal, "gpipe tra\t", "gpipe train ")
        type_into(terminal, "model=resnet10\t", "model=resnet101 ")
        type_into(terminal, "resu\t", "me=")
        type_into(terminal, "fi\t", "first/")
        type_into(terminal, " reset_o\ttr\t", "ptimizer=true ")
        type_into(terminal, "--dr\t", "--dry-run ")
        # What the shell has in its line after all that, as a program gets it.
        type_into(
            terminal,
            "\x01echo \n",
            # zsh removes the slash after a folder when the word ends.
            f"\ngpipe train model=resnet101 resume=first{'/' * (shell == 'bash')} reset_optimizer=true --dry-run",
        )


@pytest.mark.usefixtures("path_with_gpipe")
def test_fish_shows_the_candidates() -> None:
    if shutil.which("fish") is None:
        pytest.skip("needs fish")
    lines = [
        "gpipe train model=resnet10",
        "gpipe train reset_o",
        "cd /tmp; gpipe tra",
        "gpipe report fir",
        "gpipe train resume=fir",
    ]
    script = ["gpipe -sc install=fish | source", *(f"complete -C '{line}'" for line in lines)]
    done = subprocess.run(
        ["fish", "--no-config", "-c", "\n".join(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["model=resnet101", "reset_optimizer=", "train", "first/", "resume=first/"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_is_installed_is_valid_and_can_be_removed(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    complete([f"install={shell}"])
    script = capsys.readouterr().out
    assert "gpipe -sc query=" in script
    complete([f"uninstall={shell}"])
    assert "gpipe" in capsys.readouterr().out
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n", "/dev/stdin"], input=script, text=True, check=True)
