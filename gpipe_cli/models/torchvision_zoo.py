"""The models of torchvision for classification, segmentation and video, cut into layers by tracing.

The modules are torchvision's own, with its auxiliary heads, so outputs are bitwise those of the original and its
weights load by name. gpipe downloads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential import LayerSequence, to_sequential
from gpipe_cli.values import check_whole_number
from gpipe_cli.vision import torchvision

_DIMENSIONS = {"classification": 3, "segmentation": 3, "video": 4}
"""The supported tasks, and the number of dimensions of one input."""

_UNSUPPORTED = {
    "detection": "returns a different number of boxes for each image, which a pipeline cannot carry",
    "optical_flow": "takes two images and has a loop of variable length",
    "quantization": "is quantized for evaluation and cannot be trained",
}
"""Packages of torchvision.models that are not supported, and why."""


def names(task: str = "classification") -> list[str]:
    models = torchvision.models
    listed: list[str] = models.list_models(
        module=models if task == "classification" else getattr(models, task)
    )
    return listed


def build(
    name: str = "mobilenet_v3_small",
    num_classes: int = 10,
    leaves: Sequence[str] = (),
    input_shape: tuple[int, ...] = (3, 224, 224),
) -> LayerSequence:
    """Return a model with parameters drawn from torch's default generator.

    leaves: paths or classes of submodules to keep whole.
    input_shape: of one image, or of one clip as (channels, frames, height, width).
    """
    _check_input(name, _task(name), input_shape)
    check_whole_number("model.num_classes", num_classes, least=1)
    model = torchvision.models.get_model(
        name, weights=None, num_classes=num_classes, **options(name, input_shape)
    )
    # A batch of two: in training, batch norm does not accept a single sample.
    return to_sequential(model, torch.empty(2, *input_shape, device="meta"), leaves)


def options(name: str, input_shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of a torchvision model besides its classes."""
    if name in ("googlenet", "inception_v3"):
        # torchvision warns that the default of init_weights will change.
        return {"init_weights": True, "aux_logits": True}
    if name.startswith("lraspp_"):
        return {"weights_backbone": None}
    if name in names("segmentation"):
        return {"weights_backbone": None, "aux_loss": True}
    if name.startswith("vit_"):  # this family and the next are built for a fixed image size
        return {"image_size": input_shape[-1]}
    if name.startswith("maxvit_"):
        return {"input_size": input_shape[-2:]}
    return {}


def _check_input(name: str, task: str, input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != _DIMENSIONS[task]:
        needed = {3: "images: channels, height, width", 4: "clips: channels, frames, height, width"}
        raise ConfigError(
            f"model.name={name}: takes {needed[_DIMENSIONS[task]]}, and the data has {_by(input_shape)}; "
            f"choose data that fits, such as data=synthetic{'_clips' if task == 'video' else ''}"
        )
    # torchvision's builders fix this size.
    if name.startswith("mvit_") and input_shape[1:] != (16, 224, 224):
        raise ConfigError(
            f"model.name={name}: takes only clips of 3x16x224x224, and the data has {_by(input_shape)}; "
            "give data=synthetic_clips data.shape=[3,16,224,224], or choose another model"
        )


def _task(name: str) -> str:
    for task in _DIMENSIONS:
        if name in names(task):
            return task
    for package, reason in _UNSUPPORTED.items():
        if name in names(package):
            raise ConfigError(
                f"model.name={name}: {reason}; choose a model for {', '.join(list(_DIMENSIONS)[:-1])} or video"
            )
    known = [other for task in _DIMENSIONS for other in names(task)]
    near = get_close_matches(name, known, n=5) or known
    raise ConfigError(f"model.name={name}: torchvision has no such model; choose one of {', '.join(near)}")


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
