"""Files that try to configure Hydra, or to take the place of ours; and what Hydra sees of gpipe."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hydra import initialize
from hydra.core.global_hydra import GlobalHydra

from gpipe_cli.config.compose import compose
from gpipe_cli.config.sources import VERSION
from gpipe_cli.config.words import Request
from gpipe_cli.errors import ConfigError, RunError
from tests.support.package_source import trees

GLOBAL = "# @package _global_\n"
NO_FILE = "no file may configure Hydra"


def write(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("hydra: {job: {env_set: {PYTHONPATH: evil}}}", "sets hydra.job.env_set.PYTHONPATH"),
        ("defaults: [/model@hydra.job.env_set: evil]", "/model@hydra.job.env_set: evil"),
    ],
)
def test_no_recipe_configures_hydra(tmp_path: Path, recipe: str, key: str) -> None:
    """A recipe set Hydra's logging and environment, which wrote a file and made the ranks run it."""
    files = {"recipes/evil.yaml": f"{GLOBAL}{recipe}\n", "model/evil.yaml": "A: b\n"}
    with pytest.raises(ConfigError, match=NO_FILE) as raised:
        compose(Request("train", ("recipe=evil",), config_dir=write(tmp_path, files)))
    assert key in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        f"{GLOBAL}hydra: {{job: {{env_set: {{A: b}}}}}}\n",
        "hydra: {job: {env_set: {A: b}}}\n_target_: torch.nn.Linear\n",
    ],
)
def test_no_option_of_a_group_configures_hydra(tmp_path: Path, text: str) -> None:
    request = Request("train", ("model=evil",), config_dir=write(tmp_path, {"model/evil.yaml": text}))
    with pytest.raises(ConfigError, match=f"hydra.job.env_set.*: {NO_FILE}"):
        compose(request)


def test_a_primary_config_is_refused_before_its_search_path_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        {
            "mine.yaml": "defaults: [train, _self_]\nhydra: {searchpath: ['pkg://imported_by_search_path']}\n",
            "imported_by_search_path.py": "raise SystemExit('imported')\n",
        },
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"sets hydra.searchpath: {NO_FILE}"):
        compose(Request("train", (), config_name="mine", config_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("train.yaml", "chunks=1"),
        ("train_schema.yaml", "chunks=1"),
        ("model/resnet18.yaml", "chunks=1"),
        ("model/custom.yaml", "model=custom"),
        ("recipes/digits.yaml", "recipe=digits"),
        ("hydra/config.yaml", "chunks=1"),
        ("hydra/launcher/basic.yaml", "chunks=1"),
        ("optimizer/custom.yaml", "optimizer._target_=torch.optim.SGD"),
    ],
)
def test_a_file_with_the_name_of_ours_is_refused_rather_than_ignored(
    tmp_path: Path, name: str, word: str
) -> None:
    folder = write(tmp_path, {name: "seed: 3\n"})
    with pytest.raises(ConfigError, match="gpipe has a config of this name"):
        compose(Request("train", (word,), config_dir=folder))


def test_a_primary_config_is_found_in_the_folder_of_the_user(tmp_path: Path) -> None:
    """--config-dir D --config-name N never found N in D."""
    folder = write(tmp_path, {"mine.yaml": "defaults: [train, _self_]\nchunks: 3\n"})
    assert compose(Request("train", (), config_name="mine", config_dir=folder)).tree.chunks == 3
    with pytest.raises(ConfigError, match="--config-name other: no such config; it is looked for in"):
        compose(Request("train", (), config_name="other", config_dir=folder))


@pytest.mark.parametrize("path", ["/../outside", "../../outside"])
def test_a_defaults_list_leads_to_no_file_outside(tmp_path: Path, path: str) -> None:
    (tmp_path / "outside.yaml").write_text("seed: 3\n", encoding="utf-8")
    folder = write(tmp_path / "mine", {"recipes/evil.yaml": f"{GLOBAL}defaults: ['{path}']\n"})
    with pytest.raises(ConfigError):
        compose(Request("train", ("recipe=evil",), config_dir=folder))


def test_a_folder_without_yaml_files_is_no_group_of_options(tmp_path: Path) -> None:
    """In an installed package, folders of code lie beside recipes/: `eval run=mine` took run/ for a group."""
    folder = write(tmp_path, {"run/planning.py": "", "model/own.yaml": "_target_: own.build"})
    with pytest.raises(RunError, match="run=mine: no such directory"):
        compose(Request("eval", ("run=mine",), config_dir=folder))


def test_another_hydra_application_in_this_process_sees_nothing_of_gpipe() -> None:
    """Its search path plugin is registered for the whole process."""
    compose(Request("train", ()))
    assert not GlobalHydra.instance().is_initialized()
    with initialize(config_path=None, **VERSION):
        assert GlobalHydra.instance().config_loader().list_groups("") == ["hydra"]


def test_a_job_of_a_sweep_composes_while_hydra_runs_the_sweep() -> None:
    with initialize(config_path=None, **VERSION):
        outer = GlobalHydra.instance().hydra
        assert compose(Request("train", ("chunks=3",))).tree.chunks == 3
        assert GlobalHydra.instance().hydra is outer


@pytest.mark.parametrize("module", ["hydra._internal", "omegaconf._"])
def test_no_private_module_of_hydra_is_imported(module: str) -> None:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith(module) for name in names), path
