"""Files that try to configure Hydra, or to take the place of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_cli.config.compose import Request, compose
from gpipe_cli.errors import ConfigError, RunError

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
        (
            "hydra: {hydra_logging: {handlers: {f: {class: logging.FileHandler}}}}",
            "hydra.hydra_logging.handlers",
        ),
        ("hydra: {job: {env_set: {PYTHONPATH: evil}}}", "hydra.job.env_set.PYTHONPATH"),
        ("hydra: {runtime: {cwd: /}}", "hydra.runtime.cwd"),
        ("hydra: {}", "sets hydra:"),
        ("hydra: ${model}", "sets hydra:"),
        ("defaults: [/model@hydra.job.env_set: evil]", "hydra.job.env_set.A"),
        ("defaults: [/other@_global_.hydra.job.env_set]", "hydra.job.env_set.A"),
        ("defaults: [override /hydra/launcher: evil]", "hydra.launcher.A"),
        ("defaults: [override /hydra/job_logging: disabled]", "hydra.job_logging"),
        ("defaults: [override /hydra/launcher: null]", "hydra/launcher=None"),
    ],
)
def test_no_recipe_configures_hydra(tmp_path: Path, recipe: str, key: str) -> None:
    """A recipe set Hydra's logging and environment, which wrote a file and made the ranks run it."""
    files = {"recipes/evil.yaml": f"{GLOBAL}{recipe}\n"}
    others = dict.fromkeys(("model/evil.yaml", "other.yaml", "hydra/launcher/evil.yaml"), "A: b\n")
    request = Request("train", ("recipes=evil",), config_dir=write(tmp_path, {**files, **others}))
    with pytest.raises(ConfigError, match=NO_FILE) as raised:
        compose(request)
    assert key in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        f"{GLOBAL}hydra: {{job: {{env_set: {{A: b}}}}}}\n",
        "# @package hydra.job.env_set\nA: b\n",
        "hydra: {job: {env_set: {A: b}}}\n_target_: torch.nn.Linear\n",
    ],
)
def test_no_option_of_a_group_configures_hydra(tmp_path: Path, text: str) -> None:
    request = Request("train", ("model=evil",), config_dir=write(tmp_path, {"model/evil.yaml": text}))
    with pytest.raises(ConfigError, match=f"sets hydra.job.env_set.A: {NO_FILE}"):
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
    "word",
    [
        "hydra.run.dir=x",
        "+hydra.job.env_set.A=b",
        "hydra/launcher=basic",
        "+model@hydra.job=resnet18",
        "~hydra.job",
        "hydra.searchpath=[pkg://os]",
    ],
)
def test_sweeps_need_no_key_of_hydra_so_none_is_taken(word: str) -> None:
    with pytest.raises(ConfigError, match="does not accept keys of Hydra"):
        compose(Request("train", (word,)))


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("train.yaml", "chunks=1"),
        ("train_schema.yaml", "chunks=1"),
        ("model/resnet18.yaml", "chunks=1"),
        ("model/custom.yaml", "model=custom"),
        ("recipes/digits.yaml", "recipes=digits"),
        ("hydra/config.yaml", "chunks=1"),
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
    assert compose(Request("train", (), config_name="mine", config_dir=folder)).job(()).tree.chunks == 3
    with pytest.raises(ConfigError, match="--config-name other: no such config; it is looked for in"):
        compose(Request("train", (), config_name="other", config_dir=folder))


@pytest.mark.parametrize("path", ["/../outside", "../../outside"])
def test_a_defaults_list_leads_to_no_file_outside(tmp_path: Path, path: str) -> None:
    (tmp_path / "outside.yaml").write_text("seed: 3\n", encoding="utf-8")
    folder = write(tmp_path / "mine", {"recipes/evil.yaml": f"{GLOBAL}defaults: ['{path}']\n"})
    with pytest.raises(ConfigError):
        compose(Request("train", ("recipes=evil",), config_dir=folder))


def test_the_jobs_of_a_sweep_are_every_combination_the_last_key_fastest() -> None:
    composition = compose(Request("train", ("chunks=1,2", "seed=3", "epochs=range(4,6)")), multirun=True)
    assert composition.jobs == [
        ("chunks=1", "seed=3", "epochs=4"),
        ("chunks=1", "seed=3", "epochs=5"),
        ("chunks=2", "seed=3", "epochs=4"),
        ("chunks=2", "seed=3", "epochs=5"),
    ]
    assert composition.job(("chunks=2", "seed=3", "epochs=5")).tree.chunks == 2
    with pytest.raises(ConfigError, match="a sweep needs single values"):
        compose(Request("train", ("seed=interval(1,3)",)), multirun=True)


def test_a_folder_without_yaml_files_is_no_group_of_options(tmp_path: Path) -> None:
    """In an installed package, folders of code lie beside recipes/: `eval run=mine` took run/ for a group."""
    folder = write(tmp_path, {"run/build.py": "", "model/own.yaml": "_target_: own.build"})
    with pytest.raises(RunError, match="run=mine: no such directory"):
        compose(Request("eval", ("run=mine",), config_dir=folder))
