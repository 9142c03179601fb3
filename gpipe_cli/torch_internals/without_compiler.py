"""Keeps torch's compiler unloaded where it has nothing to do: importing it takes as long as importing torch.

Fake tensors and optimizers import torch._dynamo only to exclude functions from compilation and to read its settings.
Inside `without_compiler` they find a module in its place that offers these two things. torch.compile works before and
after. If the compiler is already loaded, nothing happens. For one thread at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, final

import torch

_COMPILER = "torch._dynamo"
_WRAPPED = "__dynamo_disable"
"""The attribute in which a function keeps what the compiler made of it."""


@contextmanager
def without_compiler() -> Iterator[None]:
    spec = None if _COMPILER in sys.modules else find_spec(_COMPILER)
    if spec is None:
        yield
        return
    stand_in = _StandIn(spec)
    sys.modules[_COMPILER] = stand_in
    try:
        stand_in.config = import_module(f"{_COMPILER}.config")
        yield
    finally:
        del sys.modules[_COMPILER]
        vars(torch).pop("_dynamo", None)
        stand_in.forget()


@final
class _StandIn(ModuleType):
    """Replaces the package for code that does not compile; its settings are the real ones."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_COMPILER)
        self.__spec__, self.__path__ = spec, list(spec.submodule_search_locations or ())
        self.config: ModuleType | None = None
        self._functions: list[Callable[..., Any]] = []

    def disable(self, function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        """Nothing is compiled, so there is nothing to exclude the function from."""
        self._functions.append(function)
        return function

    def graph_break(self, *_: object) -> None: ...

    def forget(self) -> None:
        """Remove the traces, so that the compiler can be imported later."""
        for function in self._functions:
            vars(function).pop(_WRAPPED, None)
