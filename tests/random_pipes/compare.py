"""Compare the record of a random pipe with that of plain autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.random_pipes.case import RandomPipe
from tests.random_pipes.run import PlainRun, RunRecord, run_pipe

SHARED_MEMORY = "writes in place a tensor whose memory also belongs to another one"
SHARED_STATE = "in its forward, and another partition holds it too"
WRITTEN_PARAMETER = "writes its parameter 'count' in its forward, and recompute would write it again"
WRITTEN = "modified by an inplace operation"
LEAF = "leaf Variable that requires grad"


def mismatches(case: RandomPipe) -> list[str]:
    """How the pipe differs from plain autograd, or from itself in one partition where layers draw."""
    pipe = run_pipe(case, whole=False)
    if any(is_refused(case, str(error)) for error in pipe.errors):
        return []
    if case.draws:
        whole = run_pipe(case, whole=True)
        recomputed = case.checkpoint != "never" and any(WRITTEN in str(error) for error in whole.errors)
        return [] if recomputed and not pipe.errors else differences(whole, pipe)
    plain = PlainRun(case).run()
    if any(LEAF in str(error) for error in plain.errors):
        return []  # a micro-batch of the reference is a leaf, those of the pipe need not be
    written = any(WRITTEN in str(error) for error in plain.errors)
    if written and not pipe.errors and (case.checkpoint != "never" or "nested_pipe" in case.layers):
        return []
    if not case.uses_twice:
        return differences(plain, pipe)
    # A tied parameter's gradients are added up layer by layer, so that its bits do not depend on the split.
    close = [f"plain: {line}" for line in differences(plain, pipe, exact=False)]
    if pipe.errors:
        return close
    whole = run_pipe(case, whole=True)
    return close or [f"one partition: {line}" for line in differences(whole, pipe)]


def is_refused(case: RandomPipe, error: str) -> bool:
    """Whether the contract of the core refuses the case, as docs/reliability.md says."""
    return (
        (SHARED_MEMORY in error and len(case.balance) > 1)
        or (SHARED_STATE in error and len(case.balance) > 1 and case.shares_state)
        or (WRITTEN_PARAMETER in error and "parameter_count" in case.layers)
    )


def differences(expected: RunRecord, given: RunRecord, *, exact: bool = True) -> list[str]:
    if bool(expected.errors) != bool(given.errors):
        return [f"expected errors {expected.errors}, got {given.errors}"]
    kinds = {_kind(error) for error in expected.errors}
    wrong = [error for error in given.errors if _kind(error) not in kinds]
    if wrong:
        return [f"expected one of {expected.errors}, got {wrong}"]
    return [
        f"round {number}: {line}"
        for number, (mine, theirs) in enumerate(zip(expected.rounds, given.rounds, strict=bool(not kinds)))
        for line in _value_differences("", mine, theirs, exact)
    ]


def _kind(error: BaseException) -> tuple[type[BaseException], bool]:
    return type(error), WRITTEN in str(error)


def _value_differences(place: str, expected: Any, given: Any, exact: bool) -> Iterator[str]:
    if type(expected) is not type(given):
        yield f"{place} is a {type(given).__name__}, not a {type(expected).__name__}"
    elif isinstance(expected, Tensor):
        yield from _tensor_differences(place, expected, given, exact)
    elif isinstance(expected, dict):
        if expected.keys() != given.keys():
            yield f"{place} has {sorted(given)}, not {sorted(expected)}"
        else:
            for key, item in expected.items():
                yield from _value_differences(f"{place}[{key}]", item, given[key], exact)
    elif isinstance(expected, list | tuple):
        if len(expected) != len(given):
            yield f"{place} has {len(given)} members, not {len(expected)}"
        for index, (mine, theirs) in enumerate(zip(expected, given, strict=False)):
            yield from _value_differences(f"{place}[{index}]", mine, theirs, exact)
    elif expected != given:
        yield f"{place} is {given!r}, not {expected!r}"


def _tensor_differences(place: str, expected: Tensor, given: Tensor, exact: bool) -> Iterator[str]:
    given = given.to(expected.device)
    mine, theirs = ((each.dtype, each.shape) for each in (expected, given))
    if mine != theirs:
        yield f"{place} has {theirs}, not {mine}"
        return
    scale = 0.0 if exact else 0.1 if expected.dtype == torch.bfloat16 else 1e-4
    if not torch.allclose(given, expected, rtol=scale, atol=scale, equal_nan=True):
        yield f"{place} is off by {(given - expected).abs().max().item():g}"
