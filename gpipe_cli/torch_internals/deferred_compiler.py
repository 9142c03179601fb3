"""Loads torch's compiler only when something uses it: importing it takes half as long as importing torch.

The first step of any optimizer imports torch._dynamo, only to exclude functions from compilation, and no public switch
of torch avoids that; so without this file a short training run takes 1.3 s of CPU time longer, next to 2 s for
importing torch. Fake tensors, meta tensors and torchvision import it for as little. Inside `deferred_compiler` they
find modules in its place that offer just what they use. Anything else, such as torch.compile, loads the compiler, which
then takes their place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any, final

import torch

_COMPILER = "torch._dynamo"
_CONFIG, _UTILS = f"{_COMPILER}.config", f"{_COMPILER}.utils"
_WRAPPED = "__dynamo_disable"
"""The attribute in which a function keeps what the compiler made of it."""


@contextmanager
def deferred_compiler() -> Iterator[None]:
    """If the compiler is already loaded, or deferred, nothing happens."""
    spec = None if _COMPILER in sys.modules else find_spec(_COMPILER)
    if spec is None:
        yield
        return
    finder = _Finder(spec)
    sys.modules |= {module.__name__: module for module in finder.stand_ins}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.remove()


@final
class _Finder(MetaPathFinder):
    """Loads the compiler before any of its submodules, but for its settings, which need nothing else."""

    def __init__(self, spec: ModuleSpec) -> None:
        package = _StandIn(_COMPILER, self, disable=self._disable, graph_break=lambda *_: None)
        package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations or ())
        self.stand_ins = package, _StandIn(_UTILS, self, is_compile_supported=_is_compile_supported)
        self._functions: list[Callable[..., Any]] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{_COMPILER}.") or name == _CONFIG:
            return None
        self.remove()
        import_module(_COMPILER)
        if name not in sys.modules:
            return None
        # The package has imported this submodule itself. The import system would take the spec of that module, and
        # import it once more.
        module = sys.modules[name]
        module.__spec__ = spec_from_loader(name, _Loaded(module))
        return module.__spec__

    def remove(self) -> None:
        """Leave no traces, so that the compiler can be imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for module in self.stand_ins:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
        if vars(torch).get("_dynamo") in self.stand_ins:
            del torch._dynamo
        for function in self._functions:
            vars(function).pop(_WRAPPED, None)
        self._functions.clear()

    def _disable(self, function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        """Nothing is compiled yet, so there is nothing to exclude the function from."""
        self._functions.append(function)
        return function


@final
class _StandIn(ModuleType):
    """A module that offers some names, and loads the compiler for all others."""

    def __init__(self, name: str, finder: _Finder, **offered: Any) -> None:
        super().__init__(name)
        self._finder = finder
        vars(self).update(offered)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks for attributes of modules
            raise AttributeError(name)
        if name == "config" and self.__name__ == _COMPILER:
            return import_module(_CONFIG)
        self._finder.remove()
        return getattr(import_module(self.__name__), name)


@final
class _Loaded(Loader):
    """Gives a module that is already loaded."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _is_compile_supported(device_type: str) -> bool:
    """The function of that name, found when it is called."""
    return bool(import_module(_UTILS).is_compile_supported(device_type))
