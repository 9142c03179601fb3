"""A configured model as a sequence: as it is, by its list of layers, or by tracing.

    model.layers=[conv1, bn1, layer1, avgpool, {call: torch.flatten, start_dim: 1}, fc]
    model.leaves=[encoder.attention]

Decides which functions a list may name: a config is data, so only those that reshape, pool or activate.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.config.suggest import or_list
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.trial import check_fit, check_outputs
from gpipe_cli.sequential import Sequence, flatten_model, to_sequential

__all__ = ["CUTTING_KEYS", "as_sequence", "check_layers"]

CUTTING_KEYS = ("layers", "leaves")
"""Keys of `model` that are not the target's own unless it takes them."""

CALLS = {
    f"torch.{name}": getattr(torch, name)
    for name in [
        "amax",
        "cos",
        "exp",
        "flatten",
        "mean",
        "movedim",
        "permute",
        "relu",
        "reshape",
        "sigmoid",
        "softmax",
        "squeeze",
        "sum",
        "swapaxes",
        "tanh",
        "transpose",
        "unflatten",
        "unsqueeze",
    ]
}
"""Functions of one tensor that a list of layers may call."""


def check_layers(cutting: Mapping[str, Any]) -> None:
    """Refuse what is no list of names and calls, before anything is built."""
    for key, items in cutting.items():
        if not isinstance(items, SequenceOf) or isinstance(items, str):
            raise ConfigError(f"model.{key}={items}: must be a list")
    for index, item in enumerate(cutting.get("layers", ())):
        _layer(item, f"model.layers[{index}]")


def as_sequence(model: nn.Module, cutting: Mapping[str, Any], sample: Tensor) -> nn.Sequential:
    """The model itself where it is a sequence and nothing was said about its layers."""
    if "layers" in cutting:
        items = enumerate(cutting["layers"])
        listed = flatten_model(model, [_layer(item, f"model.layers[{index}]") for index, item in items])
        check_fit(listed, sample, "model.layers must name all that its forward does, in order")
        return listed
    if isinstance(model, nn.Sequential) and "leaves" not in cutting:
        if not isinstance(model, Sequence):  # which was tried when it was made
            check_outputs(model, sample)
        return model
    return to_sequential(model, sample, cutting.get("leaves", ()))


def _layer(item: Any, key: str) -> Any:
    if isinstance(item, str):
        return item
    if not isinstance(item, Mapping) or "call" not in item:
        raise ConfigError(
            f"{key}={item}: give the name of a submodule, or {{call: torch.flatten, start_dim: 1}}"
        )
    name = item["call"]
    if not isinstance(name, str) or name not in CALLS:
        raise ConfigError(f"{key}.call={name}: not allowed here; {or_list(str(name), CALLS)}")
    return partial(CALLS[name], **{argument: value for argument, value in item.items() if argument != "call"})
