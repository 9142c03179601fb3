"""model=hf: any model of transformers for language, text classification or images, from a local directory.

The architecture is that of config.json. The modules are transformers' own, so outputs are bitwise those of
`from_pretrained`, and names are those of its state_dict. gpipe downloads nothing and runs no code of the directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import load_config, read_json
from gpipe_cli.models.hf.loading import Loading, is_in_head, stored_tensors
from gpipe_cli.models.hf.lora import LoraSettings, add_adapters
from gpipe_cli.models.hf.tasks import (
    CLASSIFICATION,
    check_context,
    check_input_shape,
    check_targets,
    check_vocabulary,
    ignored_tokenizer,
    model_class,
)
from gpipe_cli.sequential.without_storage import UnloadedParameter
from gpipe_cli.values import check_whole_number

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INITS = ("weights", "random")


def build(
    path: str,
    task: str | None = None,
    init: str = "weights",
    dtype: str | None = None,
    num_classes: int = 2,
    new_head: bool = False,
    lora: Mapping[str, Any] | None = None,
    input_shape: tuple[int, ...] = (32,),
    tokenizer: Any = None,
    say: Callable[[str], None] = lambda line: None,
) -> nn.Module:
    """Return the model in the directory `path`; its parameters stay in the files until a device needs them.

    init: `weights` for those of the directory; `random` to draw all parameters from torch's default generator.
    lora: the keys of `LoraSettings`, to train adapters, the head of a classifier and what the files lack, and no more.
    num_classes: of a classifier; for language models the number of tokens in the data, which the model must know.
    tokenizer: that of the data, if the data is text.
    say: prints what the user should know about the files.
    """
    if init not in INITS:
        raise ConfigError(f"model.init={init}: must be one of: {', '.join(INITS)}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"model.dtype={dtype}: must be one of: {', '.join(DTYPES)}, or null for float32")
    adapters = LoraSettings.of(lora)
    directory = Path(path)
    config = load_config(directory)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.path={path}: its weights are quantized, so they cannot be trained; give those before quantization"
        )
    task, chosen = model_class(config, task, path)
    if new_head and (task not in CLASSIFICATION or init == "random"):
        raise ConfigError(
            f"model.new_head=true: is for weights of a classifier, and this is task={task} init={init}"
        )
    _turn_off_caches(config)
    check_input_shape(task, path, input_shape)
    if task in CLASSIFICATION:
        check_whole_number("model.num_classes", num_classes, least=1)
        config.num_labels = num_classes
    if task != "image_classification":
        classes = 0 if task in CLASSIFICATION else num_classes
        check_vocabulary(config, path, classes if tokenizer is None else tokenizer.vocabulary)
        check_targets(task, tokenizer, say)
        if init == "weights" and (warning := ignored_tokenizer(directory, tokenizer)):
            say(warning)
    kind = DTYPES[dtype or "float32"]
    if init == "random":
        model: nn.Module = chosen._from_config(config, dtype=kind)
    else:
        loading = Loading(chosen, config, kind, stored_tensors(directory), path, say)
        model = loading.load(classifies=task in CLASSIFICATION, new_head=new_head)
    if task != "image_classification":
        check_context(config, model, path, input_shape[0])
    if adapters is not None:
        add_adapters(model, adapters, _trained_whole(model, task, init), say)
    return model


def normalization(node: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The mean and std per channel that an image model was trained with; `node` are the keys of the model."""
    try:
        settings = read_json(Path(node["path"]) / "preprocessor_config.json")
    except FileNotFoundError:
        return None
    match settings:
        case {"image_mean": [*mean], "image_std": [*std]} if settings.get("do_normalize", True):
            return tuple(map(float, mean)), tuple(map(float, std))
    return None


def _trained_whole(model: nn.Module, task: str, init: str) -> list[str]:
    """The parameters that are trained beside adapters: the head of a classifier, and what the files lack."""
    return [
        name
        for name, parameter in model.named_parameters()
        if (task in CLASSIFICATION and is_in_head(model, name))
        or (init == "weights" and not isinstance(parameter, UnloadedParameter))
    ]


def _turn_off_caches(config: Any) -> None:
    """Training has no use for the keys and values of earlier tokens, and a pipeline could not carry them."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if hasattr(part, "use_cache"):
            part.use_cache = False
