"""An autograd function applied without the look for functorch transforms that `Function.apply` makes in Python.

None is ever active where a pipe applies its own functions, once per action: the look would cost as much as the
function. Uses the base of `torch.autograd.Function`, which is private.
"""

from __future__ import annotations

from typing import Any

from torch.autograd import Function


def apply(function: type[Function], *arguments: Any) -> Any:
    return super(Function, function).apply(*arguments)  # type: ignore[misc]
