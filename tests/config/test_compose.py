from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from gpipe_cli.config.compose import compose, compose_tree, settings_of, sweep_words
from gpipe_cli.config.keys import list_options
from gpipe_cli.config.schema import GROUPS, SCHEMAS, TrainConfig
from gpipe_cli.config.words import Request
from gpipe_cli.errors import ConfigError


def settings(*overrides: str, command: str = "train", config_dir: Path | None = None) -> Any:
    """The typed configuration of a command line."""
    request = Request(command, overrides, config_dir=None if config_dir is None else str(config_dir))
    return compose(request).settings


def written(folder: Path, name: str, text: str) -> Path:
    """The folder for --config-dir, with a file."""
    path = folder / f"{name}.yaml"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    return folder


def test_the_defaults_are_a_complete_configuration() -> None:
    made = settings()
    assert isinstance(made, TrainConfig)
    assert made.model["name"] == "resnet18"
    assert made.data["_target_"] == "gpipe_cli.data.images.build_digits"


def combinations() -> list[list[str]]:
    """Every model alone, because it chooses other options; then the options of all other groups side by side."""
    choices = {
        group: [f"{group}={option.name}" for option in list_options(group) if option.name != "manual"]
        for group in GROUPS
    }
    models = [[choice] for choice in choices.pop("model")]
    return [*models, *([choice for choice in row if choice] for row in zip_longest(*choices.values()))]


# tests/test_recipes.py composes every recipe.
@pytest.mark.parametrize(
    "choices",
    [
        # Composing each takes a fifth of a second; the slow tests have all models.
        pytest.param(choices, marks=pytest.mark.slow) if len(choices) == 1 and number % 3 else choices
        for number, choices in enumerate(combinations())
    ],
    ids=lambda choices: " ".join(choices),
)
def test_every_yaml_composes(choices: list[str]) -> None:
    needed = {
        "data=pair": ["data.train={}", "data.test={}", "data.classes=2"],
        "data=jsonl": ["data.path=chats.jsonl"],
        "data=rows": ["data.path=chats.jsonl"],
        "model=hf": ["model.path=llama"],
        "schedule=file": ["schedule.path=order.csv"],
    }
    needs = [need for choice in choices for need in needed.get(choice, ())]
    assert isinstance(settings(*choices, *needs), TrainConfig)


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_says_what_it_is(group: str) -> None:
    for option in list_options(group):
        assert option.description.endswith((".", ":")) or len(option.description) > 10, option.path


def test_a_component_with_a_target_has_the_keys_that_it_is_given() -> None:
    made = settings("optimizer._target_=torch.optim.SGD", "optimizer.lr=0.5")
    assert made.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.5}
    assert settings("model._target_=torch.nn.Identity").model == {"_target_": "torch.nn.Identity"}


def test_code_that_the_command_line_names_is_allowed_and_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    job = compose(Request("train", ("model=mypkg.nets:build", "model.width=3", "loss=./losses.py:build")))
    assert job.settings.model == {"_target_": "mypkg.nets.build", "width": 3}
    assert job.settings.allow == job.tree.allow == ["mypkg", "losses"]
    # Ranks and a resumed run judge the composed tree again, by the overrides.
    assert settings_of(job.tree, "train", job.overrides) == job.settings
    assert job.model == "build"
    job = compose(Request("train", ("model=mypkg.nets:build", "allow=[other]")))
    assert job.settings.allow == ["other", "mypkg"]
    with pytest.raises(ConfigError, match="not allowed here"):
        settings("model._target_=mypkg.nets.build")
    monkeypatch.setenv("GPIPE_ALLOW", "mypkg,third")
    job = compose(Request("train", ("model._target_=mypkg.nets.build",)))
    assert job.settings.allow == ["mypkg", "third"] and job.tree.allow == []


def test_a_tilde_begins_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave it alone within a word, so run_dir=~/runs made a folder called `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("data: jsonl\ndata.path: ~/a.jsonl\n")
    made = settings("config=~/mine.yaml", "run_dir=~/runs/~", "data.eos_token=~x")
    assert (made.run_dir, made.data["path"]) == (f"{tmp_path}/runs/~", f"{tmp_path}/a.jsonl")
    assert made.data["eos_token"] == "~x"
    assert settings("run=~", "prompt=~/", command="generate").prompt == "~/"


def test_a_component_replaced_by_a_recipe_keeps_nothing_of_its_predecessor(tmp_path: Path) -> None:
    text = "# @package _global_\nchunks: 3\noptimizer:\n  _target_: torch.optim.SGD\n  lr: 0.5\n"
    folder = written(tmp_path, "recipes/mine", text)
    made = settings("recipe=mine", config_dir=folder)
    assert made.chunks == 3
    assert made.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.5}


def test_a_recipe_wins_over_the_defaults_and_the_command_line_over_the_recipe(tmp_path: Path) -> None:
    text = (
        "# @package _global_\ndefaults:\n  - override /model: resnet50\n  - override /optimizer: sgd\n\n"
        "chunks: 3\nepochs: 9\n"
    )
    folder = written(tmp_path, "recipes/mine", text)
    made = settings("recipe=mine", "epochs=7", config_dir=folder)
    assert (made.chunks, made.epochs, made.model["name"]) == (3, 7, "resnet50")
    assert made.optimizer["_target_"] == "torch.optim.SGD"


def test_a_model_chooses_its_data_and_the_command_line_wins(tmp_path: Path) -> None:
    text = (
        "defaults:\n  - override /data@_global_.data: synthetic\n  - override /loss@_global_.loss: mse\n"
        "_target_: gpipe_cli.models.resnet.build\n"
    )
    folder = written(tmp_path, "model/mine", text)
    made = settings("model=mine", config_dir=folder)
    assert made.data["_target_"] == "gpipe_cli.data.generated.build_synthetic"
    assert made.loss["_target_"] == "gpipe_cli.losses.mse.MeanSquaredError"
    assert (
        settings("model=mine", "data=digits", config_dir=folder).data["_target_"]
        == "gpipe_cli.data.images.build_digits"
    )


def test_a_file_cannot_allow_code(tmp_path: Path) -> None:
    folder = written(
        tmp_path, "recipes/evil", "# @package _global_\nallow: [os]\nmodel:\n  _target_: os.system\n"
    )
    with pytest.raises(ConfigError, match="may only be given on the command line"):
        settings("recipe=evil", config_dir=folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# @package _global_\nchunks: [1\n", "evil.yaml"),
        ("# @package _global_\nchunk: 3\n", "unknown key 'chunk'"),
        ("# @package _global_\nmodel:\n  _target_: os.system\n", "not allowed here"),
    ],
)
def test_a_broken_or_hostile_file_is_one_error(tmp_path: Path, text: str, says: str) -> None:
    folder = written(tmp_path, "recipes/evil", text)
    with pytest.raises(ConfigError, match=says):
        settings("recipe=evil", config_dir=folder)


@pytest.mark.parametrize(
    ("words", "optimizer", "notes"),
    [
        # The recipe chooses adamw and its learning rate, which means nothing to another optimizer.
        (("optimizer=sgd",), {"lr": 0.05}, "optimizer=sgd replaces its optimizer.lr"),
        (("optimizer=adamw",), {"lr": 0.002}, None),
        (
            ("optimizer._target_=torch.optim.SGD", "optimizer.lr=1"),
            {"lr": 1},
            "optimizer._target_ replaces its",
        ),
    ],
)
def test_an_option_of_the_command_line_replaces_that_of_a_recipe_and_its_keys(
    words: tuple[str, ...], optimizer: dict[str, Any], notes: str | None
) -> None:
    job = compose(Request("train", ("recipe=digits", *words)))
    assert isinstance(job.settings, TrainConfig)
    assert {key: job.settings.optimizer[key] for key in optimizer} == optimizer
    assert [notes in note for note in job.notes] == [True] if notes else job.notes == ()


def test_keys_that_a_recipe_sets_without_choosing_an_option_stay_where_the_option_has_them(
    tmp_path: Path,
) -> None:
    folder = written(tmp_path, "recipes/mine", "# @package _global_\ndata: {context: 64, stride: 3}\n")
    words = ("recipe=mine", "model=gpt", "data=jsonl", "data.path=x")
    job = compose(Request("train", words, config_dir=str(folder)))
    assert job.settings.data["context"] == 64 and "stride" not in job.settings.data
    assert job.notes == (f"{folder / 'recipes' / 'mine.yaml'}: data=jsonl replaces its data.stride",)


@pytest.mark.parametrize("command", SCHEMAS)
def test_no_key_is_lost_between_yaml_and_the_typed_object(command: str) -> None:
    tree = compose_tree(Request(command, ("run=x",) if command == "eval" else ()))
    plain = OmegaConf.to_container(tree)
    assert isinstance(plain, dict)
    assert set(plain) == set(SCHEMAS[command].__dataclass_fields__)


def test_a_run_of_an_earlier_version_has_the_defaults_of_newer_keys() -> None:
    tree = compose_tree(Request("train"))
    del tree.log.predictions
    read = settings_of(tree, "train", ())
    assert isinstance(read, TrainConfig) and read.log.predictions is False
    del tree.log
    with pytest.raises(ConfigError, match="'log' was removed, but it is required"):
        settings_of(tree, "train", ())


def test_a_number_may_stand_for_text_and_text_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "7")
    made = settings("run_dir=2024", "steps=${oc.env:STEPS}", "plan.budget=5", "plan=auto")
    assert (made.run_dir, made.steps, made.plan.budget) == ("2024", 7, 5.0)
    assert isinstance(made.plan.budget, float)
    with pytest.raises(ConfigError, match=r"^freeze\[0\]=\['a'\]: expected text$"):
        settings("freeze=[[a]]")


def test_a_word_of_a_sweep_stands_for_one_word_per_value() -> None:
    words = (
        "+chunks=1,2",
        "seed=3",
        "epochs=range(4,6)",
        "hydra/sweeper=optuna",
        "optimizer.lr=interval(1,9)",
    )
    assert sweep_words(Request("train", words)) == {
        "+chunks=1,2": ["+chunks=1", "+chunks=2"],
        "seed=3": ["seed=3"],
        "epochs=range(4,6)": ["epochs=4", "epochs=5"],
        "optimizer.lr=interval(1,9)": ["optimizer.lr=1.0", "optimizer.lr=9.0"],
    }


@pytest.mark.parametrize("words", [("batch_size=${batch_size}",), ("steps=${epochs}", "epochs=${steps}")])
def test_a_reference_that_contains_itself_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="recursive interpolation detected"):
        settings(*words)
