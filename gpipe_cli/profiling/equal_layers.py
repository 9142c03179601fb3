"""Which layers of a model do the same, so that one of them needs to be looked at: by structure, not by values."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_NUMBERED = frozenset({"layer_idx"})
"""A layer of Hugging Face's knows its number, which only says where a cache of generated tokens belongs."""


def structure(layer: nn.Module) -> Hashable:
    """The same for two layers that do the same with inputs of the same shapes."""
    return tuple((path, type(module), _attributes(module)) for path, module in layer.named_modules())


def signature(tensor: Tensor) -> Hashable:
    """What the work of a layer depends on, of a tensor it receives or owns."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _attributes(module: nn.Module) -> Hashable:
    own = vars(module)
    plain = [(name, _plain(own[name])) for name in own if name not in _OF_EVERY_MODULE | _NUMBERED]
    tensors = [
        (name, None if tensor is None else signature(tensor))
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
    ]
    hooks = [
        (name, _plain(hook)) for name in own if "hook" in name and own[name] for hook in own[name].values()
    ]
    return (*plain, *tensors, *hooks)


def _plain(value: Any) -> Hashable:
    """Values that cannot change are equal if they look the same; of all others only the very same object is."""
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_plain, value))
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)
