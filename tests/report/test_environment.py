from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from gpipe_cli import __version__
from gpipe_cli.report import environment as module
from gpipe_cli.report.environment import PACKAGES, environment


def test_versions_machine_and_devices_are_there_and_fit_into_json() -> None:
    facts = environment()
    assert facts["gpipe"] == __version__ and facts["torch"] == torch.__version__
    assert set(PACKAGES) < facts.keys() and facts["cores"] == os.cpu_count()
    assert facts["devices"] and facts["threads"] == torch.get_num_threads()
    json.dumps(facts)


def test_no_variable_of_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "canary-1234")
    assert "canary-1234" not in json.dumps(environment())


def test_a_package_that_is_not_installed_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("no-such-package",))
    assert environment()["no-such-package"] is None


def test_a_checkout_is_told_with_its_state_and_any_other_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "git" not in environment()
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], check=True)
    clean = environment()
    assert len(clean["git"]) == 40 and clean["git_dirty"] is False
    (tmp_path / "new").touch()
    assert environment()["git_dirty"] is True


def test_a_machine_without_git_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "git" not in environment()
