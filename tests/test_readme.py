"""The README's own commands, so that they cannot rot."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Every line of a console block from `gpipe` on; the install step before it is left out."""
    blocks = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.split(" #")[0] for block in blocks for line in block.splitlines()]
    return [line[line.index("gpipe ") :].strip() for line in lines]


def test_the_readme_shows_its_commands() -> None:
    assert len(commands()) >= 10
    assert "gpipe train" in commands()


@pytest.mark.parametrize("line", dict.fromkeys(commands()))
def test_a_command_of_the_readme_works(gpipe: Callable[..., Any], line: str) -> None:
    """Training is cut to one step, which changes nothing about whether the words are right."""
    if "<the run's directory>" in line:
        trained = gpipe("train", "steps=1", "batch_size=16", "--json").json
        line = line.replace("<the run's directory>", trained["run_dir"])
    words = shlex.split(line)[1:]
    answer = gpipe(*words, *(["steps=1", "batch_size=16"] if words[0] == "train" else []))
    assert answer.code == 0, answer.err
    assert answer.out


@pytest.mark.slow
def test_plain_gpipe_train_reaches_what_the_readme_promises(gpipe: Callable[..., Any]) -> None:
    summary = gpipe("train", "--json").json
    assert summary["top1"] >= 0.95
