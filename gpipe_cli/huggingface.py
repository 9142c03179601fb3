"""The one place that imports transformers: offline, quiet, and from local directories only.

    package = transformers()
    config = load_config(Path("llama"))

transformers imports torchvision, so `gpipe_cli.vision` comes first. A directory is data: nothing in it is run, and
nothing is fetched for it.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigError, RunError, did_you_mean
from gpipe_cli.safe_files import parse_json, read_regular

INSTALL = "pip install 'transformers>=5' tokenizers peft jinja2"
INSTALL_QUANTIZE = "pip install bitsandbytes"
CONFIG = "config.json"
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
"""Files that a tokenizer can be read from."""
MAX_JSON_BYTES = 2**26
"""The size limit of JSON files in a model's directory; the largest are indices with a row per tensor."""


def transformers() -> Any:
    """The package."""
    return import_package("transformers")


@cache
def import_package(name: str) -> Any:
    """Import transformers or a package around it, such as peft, so that it downloads and prints nothing."""
    # Read when the packages are imported. Offline is not up to the user's environment: gpipe downloads nothing.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    # The default warns in every process that is forked after the first use of a tokenizer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # It warns of a faster kernel for evaluation that could be downloaded; peft imports it too.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    importlib.import_module("gpipe_cli.vision")
    try:
        package = importlib.import_module(name)
        messages = importlib.import_module("transformers.utils.logging")
    except ImportError as error:
        install = INSTALL_QUANTIZE if name == "bitsandbytes" else INSTALL
        raise ConfigError(f"{name} cannot be imported ({error}); install it: {install}") from error
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    return package


def load_config(directory: Path, key: str = "model.path") -> Any:
    """The configuration in a model's directory, as an object of the class that transformers has for it.

    key: the setting that names the directory, for errors.
    """
    name = f"{key}={directory}"
    content = read_config(directory, key)
    package = transformers()
    known = package.models.auto.configuration_auto.CONFIG_MAPPING
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        suggestion = did_you_mean(str(model_type), known)
        raise ConfigError(
            f"{name}: transformers {package.__version__} has no architecture with model_type={model_type}"
            + (f"; {suggestion}" if suggestion else "")
        )
    try:
        return known[model_type].from_dict(content)
    except Exception as error:  # classes of configurations check their values in many ways
        raise ConfigError(
            f"{name}: {CONFIG} does not describe a {model_type}: {' '.join(str(error).split())}"
        ) from error


def read_config(directory: Path, key: str = "model.path") -> dict[str, Any]:
    """The content of config.json, which must not ask for code from elsewhere. Imports no transformers."""
    name = f"{key}={directory}"
    if not directory.is_dir():
        hint = "gpipe downloads nothing: give the path of a local directory with config.json and safetensors files"
        raise ConfigError(f"{name}: no such directory; {hint}")
    try:
        content = read_json(directory / CONFIG)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{name}: has no {CONFIG}; give the directory that `save_pretrained` wrote"
        ) from error
    if asks_for_code := next((path for path in _paths(content) if path.endswith("auto_map")), None):
        raise ConfigError(
            f"{name}: {CONFIG} asks for code of its own ({asks_for_code}), which gpipe does not run; remove that key "
            "if transformers itself has the architecture"
        )
    return content


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model's directory; FileNotFoundError if there is no such file."""
    try:
        content = parse_json(read_regular(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: damaged or unreadable: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path}: damaged: it contains a {type(content).__name__} instead of an object")
    return content


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in VOCABULARIES)


def load_tokenizer(directory: Path, key: str = "data.tokenizer") -> Any:
    """The tokenizer in a directory, with its chat template if it has one."""
    name = f"{key}={directory}"
    if not directory.is_dir():
        raise ConfigError(f"{name}: no such directory; gpipe downloads nothing, give a local one")
    for file in ("tokenizer_config.json", CONFIG):
        if (directory / file).exists() and "auto_map" in read_json(directory / file):
            raise ConfigError(f"{name}: {file} asks for code of its own (auto_map), which gpipe does not run")
    try:
        return transformers().AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a damaged or missing file surfaces as nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{name}: has no tokenizer that transformers can load: {reason}") from error


def _paths(node: Any, prefix: str = "") -> list[str]:
    """The dotted path of every key of nested objects."""
    if not isinstance(node, Mapping):
        return []
    return [
        path for key, value in node.items() for path in (f"{prefix}{key}", *_paths(value, f"{prefix}{key}."))
    ]
