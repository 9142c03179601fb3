"""The wheel holds everything, and works from an empty venv and another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source") / "gpipe"
    ignored = shutil.ignore_patterns(".git", "*.egg-info", ".*_cache", "__pycache__", "venv", ".venv")
    shutil.copytree(REPOSITORY, source, ignore=ignored)
    for name in ("runs", "build"):  # what was left here by runs and builds, not the packages of these names
        shutil.rmtree(source / name, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "dist",
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def gpipe_elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console script of an empty venv that holds the wheel and, of ours, only what gpipe depends on."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    install = [
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    (packages,) = home.glob("lib/*/site-packages")
    # The venv's own packages come first; a plain path runs no .pth file of ours, an editable gpipe stays out.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return home / "bin" / "gpipe"


def test_the_wheel_holds_every_module_config_and_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "gpipe_cli").rglob("*.py")}
    files = {
        str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "gpipe_cli" / "data" / "files").iterdir()
    }
    configs = {f"gpipe_cli/{path.relative_to(REPOSITORY)}" for path in (REPOSITORY / "conf").rglob("*.yaml")}
    recipes = {
        f"gpipe_cli/{path.relative_to(REPOSITORY)}" for path in (REPOSITORY / "recipes").rglob("*.yaml")
    }
    texts = ("completion.bash", "completion.fish", "completion.zsh", "overview.txt", "py.typed")
    assert modules and files and configs and recipes
    assert modules | files | configs | recipes | {f"gpipe_cli/{name}" for name in texts} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gpipe_cli"}


def test_the_installed_wheel_lists_and_composes_from_another_folder(
    gpipe_elsewhere: Path, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def answer(*words: str) -> str:
        done = subprocess.run(
            [gpipe_elsewhere, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert "resnet101" in answer("ls", "models")
    assert "digits" in answer("ls", "recipes")
    assert "_target_: gpipe_cli.models.resnet.build" in answer("train", "--cfg", "job")
    assert "chunks: 7" in answer("train", "recipe=digits", "--cfg", "job", "chunks=7")
    # A folder of the package, run/, has the name of this key.
    assert "run: mine" in answer("eval", "run=mine", "--cfg", "job")
    python = gpipe_elsewhere.parent / "python"
    where = [python, "-c", "import gpipe_cli; print(gpipe_cli.__file__)"]
    imported_from = subprocess.run(
        where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert Path(imported_from).is_relative_to(gpipe_elsewhere.parent.parent)
