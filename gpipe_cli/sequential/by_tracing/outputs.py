"""The form in which a model's output leaves its last layer, and the names it has outside.

A tensor or a tuple of tensors leaves as it is. Of a dict of tensors the values leave, as a tuple: a pipe
carries no dict. Anything else is refused. Knows nothing of who puts the names back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from gpipe_cli.errors import ConfigError

__all__ = ["carried", "output_names"]

_CURE = (
    "a model gives a tensor, or a tuple or dict of nothing but tensors, so wrap it in a module that returns "
    "one of these"
)


def output_names(model: nn.Module, output: Any) -> tuple[str, ...] | None:
    """The keys of a dict, None for a tensor or a tuple."""
    if isinstance(output, Tensor):
        return None
    name = type(model).__name__
    if not isinstance(output, tuple | dict):
        raise ConfigError(f"{name} returns a {type(output).__name__}; {_CURE}")
    members = output.items() if isinstance(output, dict) else enumerate(output)
    for key, member in members:
        if not isinstance(member, Tensor) or not isinstance(key, int | str):
            place = f"{type(member).__name__} at {key!r}"
            raise ConfigError(f"{name} returns a {type(output).__name__} with a {place}; {_CURE}")
    if not output:
        raise ConfigError(f"{name} returns an empty {type(output).__name__}; {_CURE}")
    return tuple(map(str, output)) if isinstance(output, dict) else None


def carried(graph: fx.Graph, output: Any) -> Any:
    """What a graph returns for a dict, which it has as a literal or as what one of its nodes gives."""
    if isinstance(output, dict):
        return tuple(output.values())
    return graph.call_function(values_of, (output,))


def values_of(output: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(output.values())
