from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from gpipe_cli.config.hydra_loader import GuardedLoader
from omegaconf import OmegaConf

from gpipe_cli.config.compose import Request, compose, compose_tree
from gpipe_cli.config.keys import list_options
from gpipe_cli.config.schema import GROUPS, SCHEMAS, TrainConfig
from gpipe_cli.errors import ConfigError


def settings(*overrides: str, command: str = "train", config_dir: Path | None = None) -> Any:
    """The typed configuration of a command line."""
    request = Request(command, overrides, config_dir=None if config_dir is None else str(config_dir))
    composition = compose(request)
    return composition.job(composition.jobs[0]).settings


def test_the_defaults_are_a_complete_configuration() -> None:
    made = settings()
    assert isinstance(made, TrainConfig)
    assert made.model["name"] == "resnet18"
    assert made.data["_target_"] == "gpipe_cli.data.digits.build"


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
        "data=csv": ["data.path=table.csv", "data.target=price"],
        "data=jsonl": ["data.path=chats.jsonl"],
        "model=hf": ["model.path=llama"],
        "schedule=file": ["schedule.path=order.csv"],
    }
    needs = [need for choice in choices for need in needed.get(choice, ())]
    assert isinstance(settings(*choices, *needs), TrainConfig)


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_says_what_it_is(group: str) -> None:
    for option in list_options(group):
        assert option.description.endswith((".", ":")) or len(option.description) > 10, option.path


def test_an_optimizer_replaced_on_the_command_line_keeps_only_the_learning_rate_and_says_so() -> None:
    made = settings("optimizer._target_=torch.optim.SGD", "optimizer.lr=0.5")
    assert made.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.5}
    words = ("optimizer=sgd", "optimizer._target_=torch.optim.Adam", "optimizer.weight_decay=0.1")
    composition = compose(Request("train", words))
    job = composition.job(composition.jobs[0])
    assert job.settings.optimizer == {"_target_": "torch.optim.Adam", "lr": 0.05, "weight_decay": 0.1}  # type: ignore[attr-defined]
    assert job.notes == (
        "optimizer._target_=torch.optim.Adam: keeps lr=0.05 of optimizer=sgd and leaves out its momentum, nesterov, "
        "no_decay, groups; give those that you want",
    )
    assert settings("model._target_=torch.nn.Identity").model == {"_target_": "torch.nn.Identity"}


def test_a_component_replaced_by_a_recipe_keeps_nothing_of_its_predecessor(tmp_path: Path) -> None:
    recipe = tmp_path / "recipes" / "mine.yaml"
    recipe.parent.mkdir()
    recipe.write_text(
        "# @package _global_\nchunks: 3\noptimizer:\n  _target_: torch.optim.SGD\n  lr: 0.5\n",
        encoding="utf-8",
    )
    made = settings("recipes=mine", config_dir=tmp_path)
    assert made.chunks == 3
    assert made.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.5}


def test_a_recipe_wins_over_the_defaults_and_the_command_line_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipes" / "mine.yaml"
    recipe.parent.mkdir()
    recipe.write_text(
        "# @package _global_\ndefaults:\n  - override /model: resnet50\n  - override /optimizer: sgd\n\n"
        "chunks: 3\nepochs: 9\n",
        encoding="utf-8",
    )
    made = settings("recipes=mine", "epochs=7", config_dir=tmp_path)
    assert (made.chunks, made.epochs, made.model["name"]) == (3, 7, "resnet50")
    assert made.optimizer["_target_"] == "torch.optim.SGD"


def test_a_model_chooses_its_data_and_the_command_line_wins(tmp_path: Path) -> None:
    model = tmp_path / "model" / "mine.yaml"
    model.parent.mkdir()
    model.write_text(
        "defaults:\n  - override /data@_global_.data: synthetic\n  - override /loss@_global_.loss: mse\n"
        "_target_: gpipe_cli.models.resnet.build\n",
        encoding="utf-8",
    )
    made = settings("model=mine", config_dir=tmp_path)
    assert made.data["_target_"] == "gpipe_cli.data.synthetic.build"
    assert made.loss["_target_"] == "gpipe_cli.losses.mse.MeanSquaredError"
    assert (
        settings("model=mine", "data=digits", config_dir=tmp_path).data["_target_"]
        == "gpipe_cli.data.digits.build"
    )


def test_a_file_cannot_allow_code(tmp_path: Path) -> None:
    recipe = tmp_path / "recipes" / "evil.yaml"
    recipe.parent.mkdir()
    recipe.write_text("# @package _global_\nallow: [os]\nmodel:\n  _target_: os.system\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="may only be given on the command line"):
        settings("recipes=evil", config_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# @package _global_\nchunks: [1\n", "evil.yaml"),
        ("# @package _global_\nchunk: 3\n", "unknown key 'chunk'"),
        ("# @package _global_\nchunks: \x01\n", "evil.yaml|special characters"),
        ("# @package _global_\nmodel:\n  _target_: os.system\n", "not allowed here"),
        (
            "# @package _global_\nmodel: !!python/object/apply:os.system ['true']\n",
            "could not determine|python/object",
        ),
    ],
)
def test_a_broken_or_hostile_file_is_one_error(tmp_path: Path, text: str, says: str) -> None:
    recipe = tmp_path / "recipes" / "evil.yaml"
    recipe.parent.mkdir()
    recipe.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        settings("recipes=evil", config_dir=tmp_path)


@pytest.mark.parametrize("command", SCHEMAS)
def test_no_key_is_lost_between_yaml_and_the_typed_object(command: str) -> None:
    tree = compose_tree(Request(command, ("run=x",) if command == "eval" else ()))
    plain = OmegaConf.to_container(tree)
    assert isinstance(plain, dict)
    assert set(plain) - {"hydra"} == set(SCHEMAS[command].__dataclass_fields__)


@pytest.mark.parametrize(
    ("overrides", "jobs"),
    [
        (("chunks=2",), 1),
        (("recipes=vit_digits",), 1),  # its model replaces that of the default option
        (("optimizer._target_=torch.optim.SGD", "optimizer.lr=0.5"), 1),
        (("chunks=1,2", "seed=3,4"), 4),
    ],
)
def test_each_job_is_composed_once(
    overrides: tuple[str, ...], jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe with its own model used to be composed twice, and the settings of every job were made twice."""
    composed = []
    original = GuardedLoader._compose_config_from_defaults_list
    monkeypatch.setattr(
        GuardedLoader,
        "_compose_config_from_defaults_list",
        lambda *args, **kwargs: composed.append(1) or original(*args, **kwargs),
    )
    composition = compose(Request("train", overrides), multirun=jobs > 1)
    assert len([composition.job(job) for job in composition.jobs]) == len(composed) == jobs


def test_the_digest_of_a_sweep_follows_its_words_and_files_but_not_its_directory(tmp_path: Path) -> None:
    option = tmp_path / "optimizer" / "mine.yaml"
    option.parent.mkdir()

    def digest(*overrides: str, lr: float = 0.1) -> str:
        option.write_text(f"_target_: torch.optim.SGD\nlr: {lr}\n", encoding="utf-8")
        request = Request("train", ("optimizer=sgd,mine", *overrides), config_dir=str(tmp_path))
        return compose(request, multirun=True).digest(("run_dir", "resume"))

    assert digest("run_dir=a") == digest("run_dir=b")
    assert len({digest(), digest("seed=1"), digest(lr=0.2)}) == 3
