from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.runs.saved import saved_config, with_overrides
from tests.support.command_line import Gpipe
from tests.support.trained_runs import GPT


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &a [*a]", "is a YAML alias"),
        (f"a: {'[' * 10**4}", "nested more than"),
        (f"seed: {'9' * 5000}", "Exceeds the limit"),
        ("- 1", "not a configuration"),
        (None, "not a regular file"),
    ],
)
def test_an_invalid_saved_config_is_reported_as_damage_to_the_run(
    tmp_path: Path, text: str | None, says: str
) -> None:
    path = tmp_path / "config.yaml"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match=says):
        saved_config(tmp_path)


def test_a_saved_config_cannot_configure_hydra(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("hydra: {job: {env_set: {A: b}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config.yaml: sets hydra.job.env_set.A"):
        saved_config(tmp_path)


def test_an_override_of_a_saved_config_stays_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """resume=... data.root='${oc.env:P}' wrote what P held into the run's config.yaml."""
    monkeypatch.setenv("P", "hunter2")
    saved = OmegaConf.create({"data": {"root": "here", "size": 3}, "seed": 1})
    composed = OmegaConf.create({"data": {"root": "${oc.env:P}", "size": 4}, "seed": 2})
    tree = with_overrides(saved, composed, ["data.root=${oc.env:P}"])
    assert OmegaConf.to_container(tree) == {"data": {"root": "${oc.env:P}", "size": 3}, "seed": 1}


def test_a_key_that_training_no_longer_has_is_left_out_of_a_saved_config(
    gpipe: Gpipe, tmp_path: Path
) -> None:
    """Runs of earlier versions saved plan.verify_budget, which only gpipe plan has."""
    saved = yaml.safe_load(gpipe("train", "--cfg", "job", "chunks=8").out)
    saved["plan"]["verify_budget"] = 120.0
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    assert set(saved_config(tmp_path).plan) == {"auto", "budget", "cache"}
    answer = gpipe("train", "--cfg", "job", "config=config.yaml")
    assert answer.code == 0 and "chunks: 8\n" in answer.out and "verify_budget" not in answer.out
    assert gpipe("cp", "run/.", "mine.yaml").code == 0
    copied = gpipe("train", "--cfg", "job", "config=mine.yaml")
    assert yaml.safe_load(copied.out) == yaml.safe_load(answer.out)


def test_a_run_works_from_any_folder_and_after_its_project_has_moved(
    gpipe: Gpipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed from any other folder: `data.path=text.txt: cannot be read`."""
    project, moved = tmp_path / "project", tmp_path / "moved"
    project.mkdir()
    (project / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    monkeypatch.chdir(project)
    words = (*GPT, "balance=uniform", "data.path=text.txt", "batch_size=8", "chunks=2")
    loss = gpipe("train", *words, "steps=2", "run_dir=runs/a", "--json").json["loss"]
    monkeypatch.chdir(tmp_path)
    project.rename(moved)
    assert gpipe("cp", "moved/runs/a", "mine.yaml").code == 0
    assert yaml.safe_load(Path("mine.yaml").read_text())["data"]["path"] == f"{moved}/text.txt"
    answer = gpipe("train", "--cfg", "job", "config=moved/runs/a/config.yaml")
    assert yaml.safe_load(answer.out)["data"]["path"] == f"{moved}/text.txt"
    answer = gpipe("eval", "run=moved/runs/a", "--json")
    assert answer.json["loss"] == loss
    told = f"data.path={moved}/text.txt: used instead of {project}/text.txt, which does not exist any more\n"
    assert answer.err.count(told) == 1
    monkeypatch.chdir(moved)
    assert gpipe("train", *words, "steps=3", "run_dir=runs/a", "resume=auto").code == 0
    saved = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    assert saved["data"]["path"] == f"{moved}/text.txt"

    Path("text.txt").rename("renamed.txt")
    answer = gpipe("train", "resume=runs/a", "steps=4")
    assert answer.code == 3 and f"data.path={moved}/text.txt: cannot be read" in answer.err
    assert gpipe("train", "resume=runs/a", "steps=4", "data.path=renamed.txt").code == 0
    Path("other.txt").write_text(Path("renamed.txt").read_text())
    answer = gpipe("train", "resume=runs/a", "steps=5", "data.path=other.txt")
    assert answer.code == 2 and "data.path=other.txt: the run was started with" in answer.err


def test_code_that_the_command_line_allows_is_found_where_the_run_was_started(
    gpipe: Gpipe, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = Path("project"), Path("elsewhere")
    for folder in (project, elsewhere):
        folder.mkdir()
    for path in (tiny_run, Path("tiny_for_tests.py")):
        path.rename(project / path.name)
    (project / "run" / "paths.json").write_text('{"folder": ["/before/it/moved", ".."]}')
    monkeypatch.chdir(elsewhere)
    monkeypatch.delitem(sys.modules, "tiny_for_tests", raising=False)
    others = [folder for folder in sys.path if not Path(folder, "tiny_for_tests.py").exists()]
    monkeypatch.setattr(sys, "path", others)
    run = f"run={tiny_run.parent}/project/run"
    monkeypatch.setenv("GPIPE_ALLOW", "tiny_for_tests")
    answer = gpipe("eval", run)
    assert answer.code == 2 and "No module named 'tiny_for_tests'" in answer.err, "no word about this run"
    answer = gpipe("eval", run, "allow=[tiny_for_tests]")
    assert answer.code == 0 and answer.err.startswith("tiny_for_tests: not in this folder; searching ")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"data.path": 1}', '{"data.path": ["/a"]}', '{"a": [1, "b"]}']
)
def test_damaged_paths_are_an_error_of_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text("data: {path: /a}\n")
    (tmp_path / "paths.json").write_text(content)
    with pytest.raises(RunError, match=r"paths.json: cannot be used"):
        saved_config(tmp_path)


def test_a_path_in_a_list_is_found_and_a_link_to_nothing_is_no_path(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: {files: [/gone/a, /gone/b]}\n")
    (tmp_path / "a").touch()
    (tmp_path / "b").symlink_to("missing")
    (tmp_path / "paths.json").write_text(
        '{"data.files[0]": ["/gone/a", "a"], "data.files[1]": ["/gone/b", "b"]}'
    )
    assert saved_config(tmp_path) == {"data": {"files": [f"{tmp_path}/a", "/gone/b"]}}


def test_only_paths_of_the_configuration_are_replaced(tmp_path: Path) -> None:
    """A record from elsewhere changes no other key, and none that was edited since."""
    (tmp_path / "config.yaml").write_text("data: {path: /edited}\nmodel: {_target_: a.b}\n")
    (tmp_path / "paths.json").write_text(
        '{"data.path": ["/gone", "."], "model._target_": ["/gone", "."], "x": ["/gone", "."]}'
    )
    assert saved_config(tmp_path) == {"data": {"path": "/edited"}, "model": {"_target_": "a.b"}}
