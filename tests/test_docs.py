"""The commands of README and docs, in a folder with the example they speak of, so that they cannot rot."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).parent.parent
PAGES = [TOP / "README.md", *sorted((TOP / "docs").glob("*.md"))]
EXAMPLE = TOP / "examples" / "your_own_model" / "mynet.py"


def commands(page: Path) -> list[str]:
    """Every line of a console block from `gpipe` on; the install step before it is left out."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line.split(" #")[0] for block in blocks for line in block.splitlines()]
    return [line[line.index("gpipe ") :].strip() for line in lines]


def test_the_pages_show_their_commands() -> None:
    readme, own_model = (commands(TOP / page) for page in ("README.md", "docs/your-own-model.md"))
    assert len(readme) >= 10 and "gpipe train" in readme
    assert len(own_model) >= 5


def test_the_pages_name_files_that_are_there() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page, target)


def test_every_model_of_the_example_is_trained_by_the_docs() -> None:
    models = re.findall(r"^def (\w+)\(num_classes", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    shown = " ".join(line for page in PAGES for line in commands(page))
    assert models and all(f"mynet.{model} " in f"{shown} " for model in models)


def test_the_error_that_the_docs_show_is_the_one_that_is_given(
    gpipe: Callable[..., Any], tmp_path: Path
) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    page = " ".join((TOP / "docs" / "your-own-model.md").read_text(encoding="utf-8").split())
    answer = gpipe("train", "model._target_=mynet.choosy", "allow=[mynet]")
    shown = re.sub(r"traced: \S*mynet\.py", "traced: mynet.py", " ".join(answer.err.split()))
    assert answer.code == 2 and shown in page


@pytest.mark.parametrize("line", dict.fromkeys(line for page in PAGES for line in commands(page)))
def test_a_command_of_the_docs_works(
    gpipe: Callable[..., Any], tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step, few samples to evaluate, a second to plan: that changes nothing about whether the words are right."""
    monkeypatch.setattr("gpipe_cli.data.digits._HELD_OUT", 100)  # every hundredth of each class
    shutil.copy(EXAMPLE, tmp_path)
    if "<the run's directory>" in line:
        trained = gpipe("train", "steps=1", "batch_size=16", "--json").json
        line = line.replace("<the run's directory>", trained["run_dir"])
    words = shlex.split(line)[1:]
    shorter = {"train": ["steps=1", "batch_size=16"], "plan": ["batch_size=16"]}.get(words[0], [])
    if any("plan" in word for word in words):
        shorter += ["plan.budget=1", *(["plan.verify_budget=1"] if "verify=true" in words else [])]
    answer = gpipe(*words, *shorter)
    assert answer.code == 0, answer.err
    assert answer.out


@pytest.mark.slow
def test_plain_gpipe_train_reaches_what_the_readme_promises(gpipe: Callable[..., Any]) -> None:
    summary = gpipe("train", "--json").json
    assert summary["top1"] >= 0.95
