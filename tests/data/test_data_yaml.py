"""The YAML files of models, data and transforms say what the builders take, and their facts are true."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from gpipe_cli.build.loader import OWN_KEYS
from gpipe_cli.config.instantiate import instantiate
from gpipe_cli.inference.inference_spec import LOADING_KEYS

CONF = Path(__file__).resolve().parents[2] / "conf"
FILES = sorted(path for group in ("model", "data", "transform") for path in (CONF / group).glob("*.yaml"))
OWN = {"synthetic_clips": {"shape", "length"}, "hf": {"lora"}}
"""Keys in which a file differs from what the builder has without it."""
OURS = [path for path in FILES if "_target_: gpipe_cli." in path.read_text()]


def builder_of(target: str) -> inspect.Signature:
    module, _, name = target.rpartition(".")
    return inspect.signature(getattr(import_module(module), name))


@pytest.mark.parametrize("path", OURS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_its_keys_are_those_of_the_builder_with_the_same_defaults(path: Path) -> None:
    written = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(written, dict)
    shared = {"data": tuple(OWN_KEYS), "model": LOADING_KEYS}.get(path.parent.name, ())
    keys = {key: value for key, value in written.items() if key not in ("_target_", "defaults", *shared)}
    parameters = dict(builder_of(str(written["_target_"])).parameters)
    # A vocabulary is its own key for the number of classes, and the command gives that too.
    given_by_the_command = [
        "data",
        "input_shape",
        "say",
        *(["num_classes"] if "vocabulary" in keys else []),
    ]
    if path.parent.name == "model":
        given_by_the_command += ["tokenizer", "class_names"]
    for name in (*given_by_the_command, *shared):
        parameters.pop(name, None)
    assert set(keys) == set(parameters)
    for name, value in keys.items():
        default = parameters[name].default
        # null for the number of classes, the name of a family and a size in its name are the file's own.
        own = {"name", "num_classes"} | ({"size"} if path.stem.endswith(f"_{value}") else set())
        own |= OWN.get(path.stem, set())
        if default is not inspect.Parameter.empty and name not in own:
            assert value == (list(default) if isinstance(default, tuple) else default), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_its_first_line_describes_it(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ") and first.endswith(".") and len(first) <= 100


@pytest.mark.parametrize(
    "name",
    [
        "digits",
        "digits_224",
        "digits_299",
        "shapes",
        "synthetic",
        "synthetic_clips",
        "text",
    ],
)
def test_the_facts_of_data_that_needs_no_files_are_true(name: str) -> None:
    path = CONF / "data" / f"{name}.yaml"
    node = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(node, dict)
    data = instantiate({key: value for key, value in node.items() if key not in OWN_KEYS}, "data")
    shape = "x".join(map(str, data.shape))
    facts = f"# facts: classes={data.classes} train={len(data.train)} test={len(data.test)} input={shape}"
    assert path.read_text().splitlines()[1] == facts
