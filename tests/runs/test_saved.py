from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.runs.saved import saved_config, with_overrides
from tests.support.command_line import Gpipe


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
