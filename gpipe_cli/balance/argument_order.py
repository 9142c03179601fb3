"""The two argument orders of `balance_by_time` and `balance_by_size`: `(module, sample, partitions)`, and that of
torchgpipe 0.0.6 and later, `(partitions, module, sample)`, recognised by the integer in front.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral
from typing import Any

from torch import nn

__all__ = ["either_order"]

Balancer = Callable[..., list[int]]
_TORCHGPIPE = ("partitions", "module", "sample")


def either_order(**refused: str) -> Callable[[Balancer], Balancer]:
    """Let a function of `(module, sample, partitions, ...)` be called in both orders.

    `refused` gives, for keywords that torchgpipe's users may expect, what to do instead.
    """

    def decorate(function: Balancer) -> Balancer:
        @wraps(function)
        def balance(*args: Any, **named: Any) -> list[int]:
            return function(**_arguments(function, args, named, refused))

        return balance

    return decorate


def _arguments(
    function: Balancer, args: tuple[Any, ...], named: dict[str, Any], refused: Mapping[str, str]
) -> dict[str, Any]:
    """The arguments by the function's own names; TypeError if they do not fit."""
    name = function.__name__
    for keyword in refused.keys() & named.keys():
        raise TypeError(f"{name}: {keyword}={named[keyword]!r} cannot be used; {refused[keyword]}")
    if "input" in named:  # torchgpipe's name for the sample of balance_by_size
        named = _joined(name, {"sample": named.pop("input")}, named)
    if args and isinstance(args[0], Integral):
        if len(args) > len(_TORCHGPIPE):
            raise TypeError(f"{name}: after partitions, module and sample, arguments are given by name")
        args, named = (), _joined(name, dict(zip(_TORCHGPIPE, args, strict=False)), named)
    try:
        given = inspect.signature(function).bind(*args, **named).arguments
    except TypeError as error:
        raise TypeError(f"{name}: {error}; call it as (module, sample, partitions)") from error
    if not isinstance(given["module"], nn.Sequential):
        raise TypeError(f"{name}: module must be an nn.Sequential, not a {type(given['module']).__name__}")
    if not isinstance(given.get("partitions", 1), Integral):
        raise TypeError(f"{name}: partitions must be an integer, not a {type(given['partitions']).__name__}")
    return given


def _joined(name: str, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    if twice := first.keys() & second.keys():
        raise TypeError(f"{name}: {min(twice)} is given twice")
    return first | second
