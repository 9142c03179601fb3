"""Check that a saved state belongs to this model and this optimizer, completely, before any of it is loaded.

A snapshot's digests prove that it is intact, not that it fits: names, shapes, dtypes and numbers are compared with
those of the engine. torch itself would convert, broadcast, or fail at the first step.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gpipe_cli.errors import RunError

MAX_NAMES = 5
"""In a message: the state of another model differs in hundreds of names."""
KINDS = ("truth value", "number", "text", "nothing")
"""The kinds of optimizer state that are not tensors."""
COUNT = "step"
"""torch's optimizers count the updates of a parameter under this key, and take roots and powers of the count."""


def check_tensors(kind: str, expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Require the same names, shapes and dtypes."""
    if missing := expected.keys() - given.keys():
        raise RunError(f"does not fit the model: it has no {kind} {_some(missing)}")
    if unexpected := given.keys() - expected.keys():
        raise RunError(f"does not fit the model, which has no {kind} {_some(unexpected)}")
    for name, tensor in expected.items():
        if not _alike(tensor, given[name]):
            raise RunError(
                f"does not fit the model: {kind} {name} is {_outline(given[name])} instead of {_outline(tensor)}"
            )


def check_parameter_state(
    name: str, expected: Mapping[str, Any], given: Mapping[str, Any], *, complete: bool
) -> None:
    """Check the optimizer state of one parameter; complete: the optimizer never has more than expected."""
    cure = "; resume with the optimizer settings of the run, or give reset_optimizer=true"
    if missing := expected.keys() - given.keys():
        raise RunError(f"does not fit the optimizer: it has no {_some(missing)} of {name}{cure}")
    if complete and (unexpected := given.keys() - expected.keys()):
        raise RunError(f"does not fit the optimizer, which keeps no {_some(unexpected)} of {name}{cure}")
    for key, value in given.items():
        wanted = value if expected.get(key) is None else expected[key]
        if isinstance(wanted, Tensor) != isinstance(value, Tensor):
            raise RunError(
                f"does not fit the optimizer: {name}/{key} is a {_kind(value)}, not a {_kind(wanted)}"
            )
        if isinstance(value, Tensor) and not _alike(wanted, value):
            raise RunError(
                f"does not fit the optimizer: {name}/{key} is {_outline(value)} instead of {_outline(wanted)}"
            )
        if not isinstance(value, Tensor):
            check_numbers({key: wanted}, {key: value}, f"{name}/")
        _check_range(f"{name}/{key}", key, value)


def check_numbers(expected: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> None:
    """Require known names, each with a value of the expected kind."""
    for key, value in given.items():
        if key not in expected:
            raise RunError(
                f"does not fit the optimizer, which never changes {prefix}{reprlib.repr(key)} itself"
            )
        if _kind(value) not in KINDS or (_kind(value) != _kind(expected[key]) and expected[key] is not None):
            raise RunError(
                f"does not fit the optimizer: {prefix}{key} is {reprlib.repr(value)}, not a {_kind(expected[key])}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise RunError(f"does not fit the optimizer: {prefix}{key} is {value}")


def check_count(key: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise RunError(f"does not fit the optimizer: {key} is {reprlib.repr(value)}, not a count")


def check_scaler(expected: Mapping[str, Any], given: Any) -> None:
    """Check the loss scale: all values are positive, except that the count of steps since the last change may be 0."""
    if not isinstance(given, dict) or given.keys() != expected.keys():
        raise RunError(f"does not fit the loss scaler: {reprlib.repr(given)}")
    for key, value in given.items():
        counts = isinstance(expected[key], int)
        known = (
            type(value) is int if counts else isinstance(value, int | float) and not isinstance(value, bool)
        )
        if not known or not 0 <= value < 2.0**127 or (value == 0 and not counts):
            raise RunError(f"does not fit the loss scaler: {key} is {reprlib.repr(value)}")


def _check_range(path: str, key: str, value: Any) -> None:
    """Check a single number, such as the step count: torch would silently train on with a wrong one."""
    if isinstance(value, Tensor) and (value.dim() > 0 or value.is_meta or not value.is_floating_point()):
        return
    number = float(value) if isinstance(value, Tensor | int | float) else 0.0
    if not math.isfinite(number) or (key == COUNT and number < 0):
        raise RunError(f"does not fit the optimizer: {path} is {number}")


def _alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype


def _outline(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "a single number"
    return f"{shape} of {str(tensor.dtype).removeprefix('torch.')}"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "nothing" if value is None else "list of values"


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(map(reprlib.repr, ordered[:MAX_NAMES])) + (", ..." if len(ordered) > MAX_NAMES else "")
