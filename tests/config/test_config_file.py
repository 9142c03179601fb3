from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from gpipe_cli.commands.cp import readable
from gpipe_cli.config.compose import compose, compose_tree
from gpipe_cli.config.keys import list_options
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.config.words import Request, sets_key
from gpipe_cli.config.yaml_files import is_saved, recorded_words
from gpipe_cli.errors import ConfigError
from tests.support.command_line import Gpipe


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def composed(text: str, *words: str, command: str = "train") -> Any:
    Path("my.yaml").write_text(text)
    return compose(Request(command, ("config=my.yaml", *words)))


SAME = {
    "model=resnet34 optimizer=sgd optimizer.lr=0.1": [
        "{model: resnet34, optimizer: {option: sgd, lr: 0.1}}",
        "{model: resnet34, optimizer: {name: sgd, lr: 0.1}}",
        "{model: resnet34, optimizer: sgd, optimizer.lr: 0.1}",
        "{model: {option: resnet34}, optimizer: {option: sgd}, optimizer.lr: 0.1}",
    ],
    "log.every=5 log.layers=true": ["{log: {every: 5, layers: true}}", "{log.every: 5, log.layers: true}"],
    "recipe=unet_speed recipe.scale=small": [
        "{recipe: unet_speed, recipe.scale: small}",
        "{recipe: {name: unet_speed, scale: small}}",
    ],
    "model=timm model.name=vit_tiny": ["{model: {option: timm, name: vit_tiny}}"],
    "model=torch.nn:Linear model.out_features=3": ["{model: {_target_: torch.nn.Linear, out_features: 3}}"],
    "schedule=1f1b": ["{schedule: 1f1b}", "{schedule: {option: 1f1b}}"],
    "model=hf model.path=x model.lora.rank=8": [
        "{model: {option: hf, path: x, lora: {rank: 8}}}",
        "{model: hf, model.path: x, model.lora.rank: 8}",
    ],
    "+model.extra=1": ["{model: {+extra: 1}}", "{+model.extra: 1}"],
    "devices=[cpu,cpu] steps=null": ["{devices: [cpu, cpu], steps: null}"],
    "model=gpt data=digits": ["{model: gpt, data: digits}"],
    "": ["{}", "{optimizer: {}}"],
}


@pytest.mark.parametrize(("text", "line"), [(text, line) for line, texts in SAME.items() for text in texts])
def test_a_file_says_what_a_command_line_would(text: str, line: str) -> None:
    alone = compose(Request("train", tuple(line.split())))
    assert OmegaConf.to_container(composed(text).tree) | {"allow": []} == OmegaConf.to_container(
        alone.tree
    ) | {"allow": []}


def test_a_key_of_the_command_line_takes_the_place_of_the_files() -> None:
    text = "{epochs: 3, steps: 7, optimizer: {option: sgd, lr: 0.1}, log: {every: 2, layers: true}}"
    settings = composed(text, "epochs=5", "optimizer.lr=1", "log.every=1").settings
    assert (settings.epochs, settings.steps, settings.optimizer["lr"]) == (5, None, 1)
    assert (settings.log.every, settings.log.layers) == (1, True)


@pytest.mark.parametrize(
    ("given", "word"),
    [("optimizer=adamw", "optimizer=adamw"), ("optimizer=torch.optim:Adam", "optimizer._target_")],
)
def test_an_option_of_the_command_line_replaces_that_of_the_file_and_says_so(given: str, word: str) -> None:
    job = composed("{epochs: 3, optimizer: {option: sgd, lr: 0.1}}", given, "optimizer.lr=3")
    assert job.settings.optimizer["lr"] == 3 and "momentum" not in job.settings.optimizer
    assert job.notes == (f"my.yaml: {word} replaces its optimizer.lr",)


def test_what_a_file_gives_counts_as_given() -> None:
    job = composed("{chunks: 2, optimizer: {option: sgd, lr: 1}}", "seed=3")
    assert all(sets_key(job.overrides, key) for key in ("chunks", "optimizer", "optimizer.lr", "seed"))
    assert not sets_key(job.overrides, "epochs")


MISTAKES = [
    ("{epoch: 1}", "unknown key 'epoch'; did you mean 'epochs'?"),
    ("{lr: 1}", "unknown key 'lr'; did you mean 'optimizer.lr'?"),
    ("{batch-size: 1}", "unknown key 'batch-size'; did you mean 'batch_size'?"),
    ("{dataset: digits}", "unknown key 'dataset'; did you mean 'data'?"),
    ("{hydra: {run: 1}}", "hydra: no file may configure Hydra; give it on the command line"),
    ("{hydra.run.dir: x}", "hydra: no file may configure Hydra"),
    ("{verify: true}", "unknown key 'verify'; gpipe train does not have it; it belongs to gpipe plan"),
    ("{allow: [os]}", "allow: may only be given on the command line"),
    ("{defaults: []}", "defaults: a file of keys has no list of defaults"),
    ("{optimizer: {lr: 1}, optimizer.lr: 2}", "optimizer.lr: given twice"),
    ("{epochs: 1, epochs.x: 2}", "epochs"),
    ("{model: resnet18, model.option: resnet34}", "model.option: given twice"),
    ("{1: 2}", "1 is not the name of a key"),
    ("{model: {a b: 2}}", "model: 'a b' is not the name of a key"),
    ("{logger: null}", "logger: null: choose an option by its name; choose one of: mlflow, none"),
    ("{logger: false}", "logger: false: choose an option by its name"),
    ("{balance: [3, 5]}", "choose an option by its name; balance=manual 'balance.layers=[3,5]'"),
    ("{recipe: {size: 1}}", "recipe: 'size' is not the name of a key"),
    ("{model: resnet19}", "model=resnet19: no such option; did you mean 'resnet"),
    ("{chunks: x}", "chunks=x: expected a whole number"),
    ("{chunks: 0}", "chunks=0: must be at least 1"),
    ("{log: {evry: 1}}", "unknown key 'log.evry'; did you mean 'log.every'?"),
    ("{model: {_target_: os.system}}", "model._target_=os.system: not allowed here"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_in_a_file_is_named_by_the_file_and_its_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(text)
    assert str(caught.value).startswith("my.yaml: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mistake_of_the_command_line_is_not_blamed_on_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^chunks=0: must be at least 1"):
        composed("{epochs: 3}", "chunks=0")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("config=", "config: give config=<file>"),
        ("config=mi.yaml", "config=mi.yaml: no such file; did you mean 'my.yaml'?"),
        ("config=elsewhere/my.yaml", "config=elsewhere/my.yaml: no such file"),
        ("config=run", "config=run: is a directory; give config=run/config.yaml"),
        ("config=pipe.yaml", "pipe.yaml: is a named pipe, not a regular file"),
        ("config=large.yaml", "large.yaml: has 200,000 bytes; gpipe reads at most 65,536"),
        ("config=alias.yaml", "alias.yaml:2: *k is a YAML alias"),
        ("config=typo.yaml", "typo.yaml: unknown key 'epoch'; did you mean 'epochs'?"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(word: str, message: str) -> None:
    Path("run").mkdir()
    Path("run", "config.yaml").touch()
    os.mkfifo("pipe.yaml")
    for name, text in {
        "my": "epochs: 3",
        "large": "x" * 200_000,
        "alias": "k: &k [1, 2, 3]\nl: *k",
        "typo": "epoch: 1",
    }.items():
        Path(f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(Request("train", (word,)))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_two_files_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"config: given 2 times \(a, b\); give one file"):
        compose(Request("train", ("config=a", "config=b")))


def test_a_file_may_not_name_code_that_the_command_line_does_not_allow(gpipe: Gpipe) -> None:
    Path("my.yaml").write_text("{model: {_target_: os.system, command: ls}, allow: [os]}")
    answer = gpipe("train", "config=my.yaml")
    assert answer.code == 2
    assert answer.err.startswith(
        "gpipe: error: my.yaml: add 'allow=[os]' to the command line if you trust os; "
    )
    assert answer.err.count("\n") == 1


def test_a_file_a_recipe_and_a_command_line_are_composed_in_this_order(gpipe: Gpipe) -> None:
    Path("my.yaml").write_text("{recipe: digits, epochs: 7, batch_size: 10, chunks: 5}")
    composed = yaml.safe_load(gpipe("train", "--cfg", "job", "batch_size=20", "config=my.yaml").out)
    assert composed["balance"]["_target_"] == "gpipe_cli.balance.time.balance"
    assert (composed["epochs"], composed["batch_size"], composed["chunks"]) == (7, 20, 5)


def test_the_configuration_of_a_run_repeats_it_to_the_bit(tiny: Gpipe) -> None:
    words = ("steps=2", "optimizer=sgd", "optimizer.lr=0.3", "partitions=2", "model.width=5")
    first = tiny("train", *words, "run_dir=first", "--json").json
    # Not `tiny`, which would add the same words again.
    from gpipe_cli.cli import main

    assert main(["train", "config=first/config.yaml", "allow=[tiny_for_tests]", "run_dir=again"]) == 0
    again = yaml.safe_load(Path("again", "summary.json").read_text())
    assert again["loss"] == first["loss"]
    name = Path("snapshots", "step-00000002", "model.safetensors")
    assert (Path("again") / name).read_bytes() == (Path("first") / name).read_bytes()
    saved = [yaml.safe_load(Path(run, "config.yaml").read_text()) for run in ("first", "again")]
    assert {**saved[0], "run_dir": None} == {**saved[1], "run_dir": None}


def saved(*words: str) -> dict[str, Any]:
    """A run directory, as far as its settings go."""
    job = compose(Request("train", words))
    Path("run").mkdir(exist_ok=True)
    Path("run", "config.yaml").write_text(OmegaConf.to_yaml(job.tree))
    Path("run", "overrides.yaml").write_text(OmegaConf.to_yaml(list(job.overrides)))
    plain: Any = OmegaConf.to_container(job.tree)
    return {**plain, "run_dir": None, "resume": None, "allow": []}


RUNS = [
    ("", {"model": "resnet18"}),
    (
        "model=gpt data.context=16 optimizer=sgd optimizer.lr=1",
        {"model": "gpt", "optimizer": {"option": "sgd", "lr": 1}},
    ),
    ("model=resnet34 data=synthetic loss=mse run_dir=x", {"data": "synthetic"}),
    (
        "model=torch.nn:Linear model.out_features=3",
        {"model": {"_target_": "torch.nn.Linear", "out_features": 3}},
    ),
    ("schedule=1f1b steps=3 log.every=1 +model.extra=[{a:1}]", {"steps": 3, "schedule": "1f1b"}),
    (
        "logger=wandb logger.project=${oc.env:HOME}",
        {"logger": {"option": "wandb", "project": "${oc.env:HOME}"}},
    ),
]


@pytest.mark.parametrize(("line", "shown"), RUNS)
def test_the_configuration_of_a_run_composes_to_itself_and_so_does_the_file_that_people_read(
    line: str, shown: dict[str, Any]
) -> None:
    before = saved(*line.split())
    after = compose(Request("train", ("config=run/config.yaml",)))
    assert {**OmegaConf.to_container(after.tree), "allow": []} == before  # type: ignore[dict-item]
    model = line.split()[0].partition("=")[2].rpartition(":")[2] if line.startswith("model") else "resnet18"
    assert after.model == model
    text = readable(before, recorded_words(Path("run")))
    assert {key: text[key] for key in shown} == shown and "epochs" not in text
    again = composed(OmegaConf.to_yaml(OmegaConf.create(text)), "allow=[]")
    assert OmegaConf.to_container(again.tree) == before


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [option.name for option in list_options("recipes")])
def test_the_configuration_of_every_recipe_composes_to_itself(recipe: str) -> None:
    before = saved(f"recipe={recipe}", *(["model.path=x"] if recipe.startswith("hf") else []))
    assert {
        **OmegaConf.to_container(compose_tree(Request("train", ("config=run/config.yaml",)))),
        "allow": [],
    } == before  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("command", "taken", "left_out"),
    [
        ("plan", {"chunks": 2, "optimizer": "torch.optim.SGD"}, ("steps", "epochs", "precision", "balance")),
        ("balance", {"chunks": 2, "schedule": "1f1b"}, ("steps", "epochs", "precision")),
    ],
)
def test_another_command_takes_the_keys_that_mean_the_same_to_it(
    command: str, taken: dict[str, Any], left_out: tuple[str, ...]
) -> None:
    saved("chunks=2", "steps=3", "precision=bf16", "optimizer=sgd", "seed=4", "schedule=1f1b")
    job = compose(Request(command, ("config=run/config.yaml",)))
    settings: Any = job.settings
    found = {
        "chunks": settings.chunks,
        "optimizer": settings.optimizer["_target_"],
        "schedule": settings.schedule.name,
    }
    assert {key: found[key] for key in taken} == taken
    (note,) = job.notes
    assert note.startswith(f"run/config.yaml: gpipe {command} leaves out what it does not use: ")
    assert set(left_out) - {"balance"} <= set(note.rpartition(": ")[2].split(", "))


def test_a_key_that_no_command_has_is_reported() -> None:
    saved()
    with Path("run", "config.yaml").open("a") as file:
        file.write("novelty: 1\n")
    with pytest.raises(ConfigError, match=r"run/config.yaml: unknown key 'novelty'"):
        compose(Request("train", ("config=run/config.yaml",)))


def test_an_older_run_without_a_key_keeps_what_its_absence_meant() -> None:
    before = saved("optimizer=adamw")
    assert before["optimizer"].pop("no_decay")
    Path("run", "config.yaml").write_text(yaml.safe_dump(before))
    job = compose(Request("train", ("config=run/config.yaml",)))
    assert isinstance(job.settings, TrainConfig) and "no_decay" not in job.settings.optimizer
    assert readable(before, recorded_words(Path("run")))["optimizer"] == before["optimizer"]


@pytest.mark.parametrize(
    "plain",
    [{}, {"model": "resnet18"}, {"model": {"_target_": "x"}}, {"allow": [], "model": "resnet18"}],
)
def test_a_file_of_keys_is_not_taken_for_a_saved_configuration(plain: dict[str, Any]) -> None:
    assert not is_saved(plain)
