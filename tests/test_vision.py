"""torchvision imports beside any torch. What an import does is seen in interpreters of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpipe_cli import vision

ROOT = Path(__file__).resolve().parents[1]


def run_python(program: str, *search_path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*search_path, ROOT]))}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with an empty torchvision, without an extension."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").touch()
    return tmp_path


@pytest.fixture
def not_yet_imported(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "torchvision")
    monkeypatch.syspath_prepend(stand_in)
    return stand_in / "torchvision"


def add_extension_that_loads(package: Path) -> None:
    library = next((Path(torch.__file__).parent / "lib").glob("libtorch_global_deps.*"))
    shutil.copy(library, package / "_C.so")


@pytest.mark.slow
def test_a_plain_import_of_torchvision_works_after_ours_and_its_models_run() -> None:
    program = """
import gpipe_cli.vision as vision
import torch, torchvision
from torchvision import models, transforms, datasets
assert vision.torchvision is torchvision
assert (vision._declared is None) == torchvision.extension._has_ops()
print(tuple(models.resnet18(weights=None, num_classes=3).eval()(torch.zeros(1, 3, 32, 32)).shape))
"""
    assert run_python(program) == "(1, 3)\n"


def test_an_extension_that_loads_counts_as_loading(not_yet_imported: Path) -> None:
    add_extension_that_loads(not_yet_imported)
    assert vision._operators_load()


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_an_extension_that_is_missing_or_broken_counts_as_not_loading(
    not_yet_imported: Path, content: bytes | None
) -> None:
    if content is not None:
        (not_yet_imported / "_C.so").write_bytes(content)
    assert not vision._operators_load()


def test_a_torchvision_that_was_imported_before_is_left_alone() -> None:
    assert "torchvision" in sys.modules
    assert vision._declare_missing_operators() is None


def test_a_torchvision_that_is_not_installed_is_left_to_pythons_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vision, "find_spec", lambda name: None)
    assert vision._operators_load()
