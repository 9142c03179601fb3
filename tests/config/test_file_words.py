from __future__ import annotations

from typing import Any

import pytest
import yaml
from gpipe_cli.config.file_words import ConfigFile, file_words

from gpipe_cli.errors import ConfigError

SAME = {
    "model=resnet18 optimizer=sgd optimizer.lr=0.1": [
        "{model: resnet18, optimizer: {option: sgd, lr: 0.1}}",
        "{model: resnet18, optimizer: {name: sgd, lr: 0.1}}",
        "{model: resnet18, optimizer: sgd, optimizer.lr: 0.1}",
        "{model: {option: resnet18}, optimizer: {option: sgd}, optimizer.lr: 0.1}",
    ],
    "log.every=5 log.layers=true": ["{log: {every: 5, layers: true}}", "{log.every: 5, log.layers: true}"],
    "recipe=digits recipe.scale=small": [
        "{recipe: digits, recipe.scale: small}",
        "{recipe: {name: digits, scale: small}}",
    ],
    "model=timm model.name='vit_tiny'": [
        "{model: {option: timm, name: vit_tiny}}",
        "{model: timm, model.name: vit_tiny}",
    ],
    "model._target_='mine.build' model.name='x'": ["{model: {_target_: mine.build, name: x}}"],
    "schedule=1f1b": ["{schedule: 1f1b}", "{schedule: {option: 1f1b}}"],
    "schedule.name='mine.schedule'": ["{schedule: {name: mine.schedule}}"],
    "model.lora={rank:8,targets:['q','v']}": ["{model: {lora: {rank: 8, targets: [q, v]}}}"],
    "+model.extra=1": ["{model: {+extra: 1}}", "{+model.extra: 1}"],
    "devices=['cpu','cpu'] steps=null": ["{devices: [cpu, cpu], steps: null}"],
    "run_dir='a,b' time_limit='it\\'s'": ["{run_dir: 'a,b', time_limit: it's}"],
    "optimizer.groups=[{match:'head',lr_scale:10}]": ["{optimizer.groups: [{match: head, lr_scale: 10}]}"],
    "": ["{}", "{optimizer: {}}"],
}


@pytest.mark.parametrize(
    ("text", "words"), [(text, words) for words, texts in SAME.items() for text in texts]
)
def test_a_file_stands_for_the_words_of_a_command_line(text: str, words: str) -> None:
    assert file_words(yaml.safe_load(text), "train") == tuple(words.split())


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"epoch": 1}, "unknown key 'epoch'; did you mean 'epochs'?"),
        ({"lr": 1}, "unknown key 'lr'; did you mean 'optimizer.lr'?"),
        ({"batch-size": 1}, "unknown key 'batch-size'; did you mean 'batch_size'?"),
        ({"dataset": "digits"}, "unknown key 'dataset'; did you mean 'data'?"),
        ({"hydra": {"run": 1}}, "unknown key 'hydra'; see `gpipe train --help`"),
        ({"verify": True}, "verify: gpipe train does not have this key; it belongs to plan"),
        ({"allow": ["os"]}, "allow: may only be given on the command line"),
        ({"defaults": []}, "defaults: a file of keys has no list of defaults"),
        ({"optimizer": {"lr": 1}, "optimizer.lr": 2}, "optimizer.lr: given twice"),
        ({"epochs": 1, "epochs.x": 2}, "epochs: given twice"),
        ({"model": "resnet18", "model.option": "resnet34"}, "model.option: given twice"),
        ({1: 2}, "1 is not the name of a key"),
        ({"model": {"a b": 2}}, "model: 'a b' is not the name of a key"),
        ({"data": {"classes": {"größe": 2}}}, "data.classes: 'größe' cannot be a key here"),
        ({"logger": None}, "logger: null: choose an option by its name; choose one of: mlflow, none"),
        ({"logger": False}, "logger: false: choose an option by its name"),
        ({"balance": [3, 5]}, r"choose an option by its name; balance: {option: manual, layers: \[3, 5\]}"),
        ({"recipe": {"size": 1}}, "unknown key 'recipe.size'; choose one of: option, scale"),
        ({"log": {"every": b"x"}}, "log.every: a value of type bytes cannot be used"),
    ],
)
def test_a_mistake_in_a_file_is_named_by_its_key(plain: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        file_words(plain, "train")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("chunks=0: must be at least 1", True),
        ("unknown key 'model.lora.rnk'; did you mean 'model.lora'?", True),
        ("data=digit: no such option", True),
        ("data.length: unknown", False),
        ("chunks_of_wood: unknown", False),
        ("epochs=0: must be at least 1", False),
    ],
)
def test_an_error_about_a_key_of_the_file_begins_with_its_name(message: str, named: bool) -> None:
    file = ConfigFile("my.yaml", ("chunks=0", "model.lora={rnk:1}", "data=digit"))
    with pytest.raises(ConfigError) as caught, file.named_in_errors():
        raise ConfigError(message)
    assert str(caught.value) == (f"my.yaml: {message}" if named else message)
