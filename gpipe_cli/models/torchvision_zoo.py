"""Every classification model of torchvision, cut into layers by tracing.

Decides which names are taken, why others are not, and how a model is told the size of its images. The
modules are torchvision's own, so outputs are bitwise those of the original and its weights load by name.
Nothing is ever downloaded. How a model is cut is the business of `gpipe_cli.sequential`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.classes import check_num_classes
from gpipe_cli.models.weights import load_weights, read_weights
from gpipe_cli.sequential import Sequence, to_sequential
from gpipe_cli.vision import torchvision

__all__ = ["build", "names"]

_REFUSED = {
    "detection": "returns boxes, a different number for each image, which no layer can be cut out of",
    "segmentation": "returns a dict, and tensors are needed",
    "video": "takes clips, and the data here are images",
    "optical_flow": "takes two images and repeats itself as often as it is told",
    "quantization": "is made for evaluation in whole numbers and cannot be trained",
}
"""Packages of torchvision.models whose models are not taken, and why."""

# Given, because torchvision warns that it will change its mind about the first; the second would return
# tuples in training, which the losses here do not take.
_WITH_AUXILIARY_HEADS = {"init_weights": True, "aux_logits": False}


def names() -> list[str]:
    listed: list[str] = torchvision.models.list_models(module=torchvision.models)
    return listed


def build(
    name: str = "mobilenet_v3_small",
    num_classes: int = 10,
    weights: str | Path | None = None,
    leaves: SequenceOf[str] = (),
    input_shape: tuple[int, ...] = (3, 224, 224),
) -> Sequence:
    """A model with fresh parameters from torch's default generator, or with those of the file `weights`.

    leaves: paths or classes of submodules that are not to be cut.
    input_shape: of one image; the model is made and cut for it.
    """
    _check_name(name)
    check_num_classes(num_classes)
    model = torchvision.models.get_model(
        name, weights=None, num_classes=num_classes, **_options(name, input_shape)
    )
    # Two images: batch norm in training knows no single one.
    sequence = to_sequential(model, torch.empty(2, *input_shape, device="meta"), leaves)
    if weights is not None:
        load_weights(sequence, read_weights(weights), weights)
    return sequence


def _options(name: str, input_shape: tuple[int, ...]) -> dict[str, Any]:
    """What a model is told besides its classes: two families are built for one size of images."""
    if name in ("googlenet", "inception_v3"):
        return _WITH_AUXILIARY_HEADS
    if name.startswith("vit_"):
        return {"image_size": input_shape[-1]}
    if name.startswith("maxvit_"):
        return {"input_size": input_shape[-2:]}
    return {}


def _check_name(name: str) -> None:
    if name in names():
        return
    for package, reason in _REFUSED.items():
        if name in torchvision.models.list_models(module=getattr(torchvision.models, package)):
            raise ConfigError(f"model.name={name}: {reason}; choose a classification model")
    near = get_close_matches(name, names(), n=5) or names()
    raise ConfigError(f"model.name={name}: torchvision has no such model; choose one of {', '.join(near)}")
