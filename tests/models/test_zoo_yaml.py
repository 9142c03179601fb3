"""The facts of our own models' YAML files are true, and each file chooses data and a loss that fit."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from gpipe_cli.build.model import WEIGHTS_KEYS
from tests.support.command_line import Gpipe

CONF = Path(__file__).resolve().parents[2] / "conf"
OURS = ("amoebanetd", "gpt", "mlp", "unet", "unet_standard")
MEASURED = {
    "cross_entropy": ["top1", "top5"],
    "dice": ["mean_iou", "pixel_accuracy"],
    "token_cross_entropy": ["token_accuracy", "bits_per_token"],
}


def choices(name: str) -> dict[str, str]:
    """The options of other groups that a model's file chooses, by group."""
    lines = (CONF / "model" / f"{name}.yaml").read_text().splitlines()
    chosen = [line.split("@_global_.")[1] for line in lines if line.startswith("  - override /")]
    return dict(line.split(": ") for line in chosen)


@pytest.mark.parametrize("name", OURS)
def test_the_facts_of_its_yaml_are_true(name: str) -> None:
    path = CONF / "model" / f"{name}.yaml"
    node: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[assignment]
    module, _, builder = node["_target_"].rpartition(".")
    of_data = (CONF / "data" / f"{choices(name)['data']}.yaml").read_text()
    ((classes, given),) = re.findall(r"^# facts: classes=(\d+) .* input=([\dx]+)$", of_data, re.MULTILINE)
    shape = tuple(map(int, given.split("x")))
    not_its_own = ("_target_", "defaults", "num_classes", *WEIGHTS_KEYS)
    keys = {key: value for key, value in node.items() if key not in not_its_own}
    with torch.device("meta"):
        model = getattr(import_module(module), builder)(**keys, num_classes=int(classes), input_shape=shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts = f"# facts: parameters={parameters} layers={len(model)} input={given}"
    assert path.read_text().splitlines()[1] == facts


SMALL = {
    "amoebanetd": ["model.num_filters=16", "data=synthetic", "data.length=32"],
    "gpt": ["model.width=16", "model.depth=2"],
    "mlp": ["model.width=8"],
    "unet": ["model.base_channels=4", "data.length=32"],
    "unet_standard": ["model.base_channels=4", "data.length=32"],
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("gpt", "unet") else pytest.param(name, marks=pytest.mark.slow) for name in OURS],
)
def test_it_trains_and_evaluates_with_its_own_data_and_loss(gpipe: Gpipe, name: str) -> None:
    trained = gpipe("train", f"model={name}", "steps=1", "batch_size=32", "chunks=2", *SMALL[name], "--json")
    assert trained.code == 0, trained.err
    measured = MEASURED[choices(name)["loss"]]
    assert list(trained.json)[: 1 + len(measured)] == ["loss", *measured]
    evaluated = gpipe("eval", f"run={trained.json['run_dir']}", "engine=single", "threads=1", "--json")
    assert evaluated.code == 0, evaluated.err
    assert {key: evaluated.json[key] for key in ("loss", *measured)} == {
        key: trained.json[key] for key in ("loss", *measured)
    }
