"""The models of torchvision for classification, segmentation and video, cut into layers by tracing.

Decides which names are taken, why others are not, and what a model is told besides its classes. The modules are
torchvision's own, so outputs are bitwise those of the original and its weights load by name. Nothing is ever
downloaded. Auxiliary heads are there as torchvision trains them; which loss they are given is the config's
word. How a model is cut is the business of `gpipe_cli.sequential`.
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

__all__ = ["build", "names", "options"]

_DIMENSIONS = {"classification": 3, "segmentation": 3, "video": 4}
"""The tasks whose models are taken, and of how many dimensions one input is."""

_REFUSED = {
    "detection": "returns boxes, a different number for each image, which no layer can be cut out of",
    "optical_flow": "takes two images and repeats itself as often as it is told",
    "quantization": "is made for evaluation in whole numbers and cannot be trained",
}
"""Packages of torchvision.models whose models are not taken, and why."""


def names(task: str = "classification") -> list[str]:
    models = torchvision.models
    listed: list[str] = models.list_models(
        module=models if task == "classification" else getattr(models, task)
    )
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
    input_shape: of one image, or of one clip as (channels, frames, height, width); the model is made and cut
    for it.
    """
    _check_input(name, _task(name), input_shape)
    check_num_classes(num_classes)
    model = torchvision.models.get_model(
        name, weights=None, num_classes=num_classes, **options(name, input_shape)
    )
    # Two inputs: batch norm in training knows no single one.
    sequence = to_sequential(model, torch.empty(2, *input_shape, device="meta"), leaves)
    if weights is not None:
        load_weights(sequence, read_weights(weights), weights)
    return sequence


def options(name: str, input_shape: tuple[int, ...]) -> dict[str, Any]:
    """What torchvision is told of a model besides its classes."""
    if name in ("googlenet", "inception_v3"):
        # Given, because torchvision warns that it will change its mind about the first.
        return {"init_weights": True, "aux_logits": True}
    if name.startswith("lraspp_"):
        return {"weights_backbone": None}
    if name in names("segmentation"):
        return {"weights_backbone": None, "aux_loss": True}
    if name.startswith("vit_"):  # this family and the next are built for one size of images
        return {"image_size": input_shape[-1]}
    if name.startswith("maxvit_"):
        return {"input_size": input_shape[-2:]}
    return {}


def _check_input(name: str, task: str, input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != _DIMENSIONS[task]:
        needed = {3: "images: channels, height, width", 4: "clips: channels, frames, height, width"}
        raise ConfigError(
            f"model.name={name}: takes {needed[_DIMENSIONS[task]]}, and the data gives {_by(input_shape)}; "
            f"choose fitting data, such as data=synthetic{'_clips' if task == 'video' else ''}"
        )
    # torchvision's own functions fix this size, whatever they are told.
    if name.startswith("mvit_") and input_shape[1:] != (16, 224, 224):
        raise ConfigError(
            f"model.name={name}: takes clips of 3x16x224x224 only, and the data gives {_by(input_shape)}; "
            "give data=synthetic_clips data.shape=[3,16,224,224], or choose another model"
        )


def _task(name: str) -> str:
    for task in _DIMENSIONS:
        if name in names(task):
            return task
    for package, reason in _REFUSED.items():
        if name in names(package):
            raise ConfigError(
                f"model.name={name}: {reason}; choose a model for {', '.join(list(_DIMENSIONS)[:-1])} or video"
            )
    known = [one for task in _DIMENSIONS for one in names(task)]
    near = get_close_matches(name, known, n=5) or known
    raise ConfigError(f"model.name={name}: torchvision has no such model; choose one of {', '.join(near)}")


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
