"""All models of torchvision for classification, segmentation and video, with the smallest input each accepts."""

from __future__ import annotations

from functools import partial

from torch import nn

from benchmarks.models.subject import Subject, image_batches
from gpipe_cli.models import torchvision_zoo
from gpipe_cli.vision import torchvision

TASKS = ("classification", "segmentation", "video")
CLASSES = 5
LEAST_LAYERS = 9
SMALLEST_SHAPES = {
    "inception_v3": (3, 299, 299),
    "maxvit_t": (3, 224, 224),
    "vit_h_14": (3, 56, 56),
    "mvit_v1_b": (3, 16, 224, 224),
    "mvit_v2_s": (3, 16, 224, 224),
    "s3d": (3, 16, 224, 224),
}
"""Input shapes of models that do not accept 64x64 images or clips of four 32x32 frames."""


def subjects() -> list[Subject]:
    return [subject(name) for task in TASKS for name in torchvision_zoo.names(task)]


def subject(name: str) -> Subject:
    task, shape = _task(name), smallest_shape(name)
    return Subject(
        "torchvision", name, task, partial(_build, name, shape), partial(image_batches, *shape), LEAST_LAYERS
    )


def smallest_shape(name: str) -> tuple[int, ...]:
    return SMALLEST_SHAPES.get(name, (3, 4, 32, 32) if _task(name) == "video" else (3, 64, 64))


def _task(name: str) -> str:
    return next(task for task in TASKS if name in torchvision_zoo.names(task))


def original_of(name: str, shape: tuple[int, ...]) -> nn.Module:
    model = torchvision.models.get_model(
        name, weights=None, num_classes=CLASSES, **torchvision_zoo.options(name, shape)
    )
    assert isinstance(model, nn.Module)
    return model


def _build(name: str, shape: tuple[int, ...], dropout: float) -> nn.Module:
    model = original_of(name, shape)
    for module in model.modules():
        for attribute in ("p", "dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, dropout)
    return model
