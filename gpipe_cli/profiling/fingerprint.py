"""What a measurement depends on, as plain data: two runs with equal fingerprints would measure the same.

Decides what counts: every layer with its settings, the shapes of its tensors and the source of its classes, the
sample, the loss, the device, threads and versions. Values of parameters do not: time does not depend on them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import re
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.sequential import layer_names
from gpipe_cli.version import VERSION

__all__ = ["fingerprint"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_VERSIONED = ("torch.", "torchvision.", "gpipe_cli.")
"""Packages whose source does not change without their version."""


def fingerprint(module: nn.Sequential, sample: Sample) -> dict[str, Any]:
    device = tensors_of(sample.input)[0].device
    return {
        "gpipe": VERSION,
        "torch": str(torch.__version__),
        "model": _model(module),
        "layers": len(module),
        "input": [_tensor(one) for one in tensors_of(sample.input)],
        "target": None if sample.target is None else _tensor(sample.target),
        "loss": None if sample.loss is None else _loss(sample.loss),
        "device": str(device),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "autocast": str(torch.get_autocast_dtype(device.type))
        if torch.is_autocast_enabled(device.type)
        else None,
    }


def _model(module: nn.Sequential) -> str:
    """A digest: all of it would be longer than the measurement."""
    told = [
        [name, _plain(repr(layer)), _graphs(layer), [[key, _tensor(one)] for key, one in _tensors(layer)]]
        for name, layer in zip(layer_names(module), module, strict=True)
    ]
    classes = {type(one) for one in module.modules()}
    sources = sorted(source for one in classes if (source := _source(one)))
    return hashlib.sha256(json.dumps([told, sources]).encode()).hexdigest()


def _tensors(layer: nn.Module) -> list[tuple[str, Tensor]]:
    return [*layer.named_parameters(), *layer.named_buffers()]


def _tensor(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype), tensor.requires_grad]


def _graphs(layer: nn.Module) -> list[str]:
    """The code of layers that were made by tracing, which their description leaves out."""
    return [_plain(str(graph)) for graph in getattr(layer, "_graphs", {}).values()]


def _source(kind: type) -> str:
    """Of a class of the user's, who may change what it does and keep its name."""
    if f"{kind.__module__}.".startswith(_VERSIONED):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # made in a shell, or in C
        return f"{kind.__module__}.{kind.__qualname__}"


def _loss(loss: LossFunction) -> str:
    return _plain(repr(loss))


def _processor() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _plain(text: str) -> str:
    """Without addresses, which differ from run to run."""
    return _ADDRESS.sub("", text)
