"""The one place that first imports torchvision: `from gpipe_cli.vision import torchvision`.

torchvision's published wheel is built for CUDA. Next to a CPU-only torch its compiled operators cannot be loaded, and
`import torchvision` fails when it registers fake versions of operators that do not exist. This file checks beforehand
whether the operators load. If they do not, it declares the two schemas that torchvision asks for, which is enough for
its models, datasets and transforms.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

import torch

__all__ = ["torchvision"]

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _operators_load() -> bool:
    """Load torchvision's operators as torchvision will; loading twice is free and a failure has no effect."""
    package = find_spec("torchvision")
    if package is None:
        return True  # not installed: the import below reports it
    extension = PathFinder.find_spec("_C", package.submodule_search_locations)
    if extension is None or extension.origin is None:
        return False
    try:
        torch.ops.load_library(extension.origin)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return True


def _declare_missing_operators() -> torch.library.Library | None:
    if "torchvision" in sys.modules or _operators_load():
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    return library


# torch drops the declarations when the Library is collected, so keep it as long as this module.
_declared = _declare_missing_operators()

import torchvision  # type: ignore[import-untyped] # noqa: E402 - the declarations must come first
