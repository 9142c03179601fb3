"""Whether a value from YAML fits an annotation, said in words of the command line.

Only what YAML can hold is judged (null, yes/no, numbers, text, lists, mappings); an annotation that says
something else about such a value is left to the function that takes it.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list such as [1,2]",
    dict: "a mapping",
    type(None): "null",
}


def mismatch(value: Any, annotation: Any) -> str | None:
    """`expected a number`, or None where the value fits or cannot be judged."""
    members = _members(annotation)
    if members is None or any(_fits(value, member) for member in members):
        return None
    return f"expected {' or '.join(dict.fromkeys(WORDS[one] for one in members if one in WORDS))}"


def _members(annotation: Any) -> list[type] | None:
    """The kinds an annotation admits; None where one of them is beyond judgement."""
    if annotation is None:
        return [type(None)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [_members(one) for one in typing.get_args(annotation)]
        return None if None in parts else [kind for part in parts for kind in (part or [])]
    origin = typing.get_origin(annotation) or annotation
    if origin in (list, tuple, Sequence):
        return [list]
    if origin in WORDS:
        return [origin]
    # No YAML value is ever a tensor, so `float | Tensor` still asks for a number.
    return [origin] if isinstance(origin, type) and origin.__module__.startswith("torch") else None


def _fits(value: Any, kind: type) -> bool:
    if kind in (int, float):
        return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if kind is list:
        return isinstance(value, list | tuple)
    if kind is dict:
        return isinstance(value, Mapping)
    return isinstance(value, kind)
