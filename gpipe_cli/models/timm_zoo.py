"""model=timm: any model of timm by name.

The modules are timm's own, so outputs are bitwise those of the original and its weights load by name. gpipe downloads
nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.weights import shape_text
from gpipe_cli.values import check_whole_number


def build(
    name: str = "resnet18",
    num_classes: int = 10,
    input_shape: tuple[int, ...] = (3, 224, 224),
) -> nn.Module:
    """Return a model with parameters drawn from torch's default generator."""
    check_whole_number("model.num_classes", num_classes, least=1)
    if len(input_shape) != 3:
        raise ConfigError(
            f"model.name={name}: takes images, and the data has {shape_text(input_shape)}; choose data that fits, such "
            "as data=image_folder"
        )
    return _create(name, num_classes, input_shape)


def normalization(node: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The mean and std per channel that the model was trained with; `node` are the keys of the model."""
    settings = _settings(node["name"])
    return tuple(settings.mean), tuple(settings.std)


def _create(name: str, num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    settings = _settings(name)
    options: dict[str, Any] = {"in_chans": input_shape[0]}
    if settings.fixed_input_size and tuple(input_shape[1:]) != tuple(settings.input_size[1:]):
        options["img_size"] = input_shape[1:]
    try:
        model: nn.Module = _timm().create_model(name, pretrained=False, num_classes=num_classes, **options)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"model.name={name}: cannot be built for {num_classes} classes of {shape_text(input_shape)}: {error}; "
            f"timm made it for {shape_text(settings.input_size)}"
        ) from error
    return model


def _settings(name: str) -> Any:
    """timm's configuration of a model: input size, normalization and the name of the head."""
    timm = _timm()
    if not timm.is_model(name):
        known = timm.list_models()
        near = get_close_matches(name, known, n=5)
        raise ConfigError(
            f"model.name={name}: timm has no such model"
            + (f"; did you mean {', '.join(near)}?" if near else f"; it has {len(known)}, such as resnet18")
        )
    settings = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if settings is None:
        raise ConfigError(
            f"model.name={name}: timm has no configuration {name.partition('.')[2]} of this model"
        )
    return settings


def _timm() -> Any:
    importlib.import_module("gpipe_cli.vision")  # timm imports torchvision
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise ConfigError(
            f"model=timm: timm cannot be imported ({error}); install it: pip install 'timm>=1'"
        ) from error
