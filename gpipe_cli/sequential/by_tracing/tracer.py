"""Record a model's forward in one mode as a torch.fx graph, and decide which modules stay whole in it."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, final

import torch
from torch import fx, nn

from gpipe_cli.errors import ConfigError

_TORCH = Path(torch.__file__).parent


@final
class Leaves:
    """The modules that tracing does not look into.

    These are modules without children, so that attributes such as `p`, `eps` and `training` are read when the module
    runs; modules of torch.nn that are not containers; and those that the user chooses by path or class name.
    """

    def __init__(self, model: nn.Module, chosen: Iterable[str] = ()) -> None:
        self._chosen = frozenset([chosen] if isinstance(chosen, str) else chosen)
        known = {name for path, module in model.named_modules() for name in (path, type(module).__name__)}
        for name in sorted(self._chosen - known):
            near = get_close_matches(name, known) or sorted(path for path, _ in model.named_children())
            raise ConfigError(
                f"model.leaves: {type(model).__name__} has no submodule or class '{name}'; "
                f"close names: {', '.join(near)}"
            )

    def include(self, module: nn.Module, path: str) -> bool:
        if path in self._chosen or type(module).__name__ in self._chosen:
            return True
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            return False
        childless = next(module.children(), None) is None
        return childless or type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))

    def outermost(self, model: nn.Module, path: str) -> str | None:
        """Return the path of the first leaf on the way down from `model` to the module at `path`."""
        parts = path.split(".") if path else []
        for length in range(1, len(parts) + 1):
            prefix = ".".join(parts[:length])
            if self.include(model.get_submodule(prefix), prefix):
                return prefix
        return None


def trace(clone: nn.Module, leaves: Leaves, inputs: int, training: bool) -> fx.Graph:
    """Trace a call with `inputs` positional arguments; the other arguments have their defaults."""
    tracer = _Tracer(leaves, inputs)
    rng_state = torch.get_rng_state()
    try:
        graph = tracer.trace(clone.train(training))
    except Exception as error:
        # The model's own code, run with proxies instead of tensors, may raise anything.
        raise ConfigError(_trace_error(error, clone, tracer.current_path)) from error
    # Random numbers whose shape is known are drawn while tracing and become a constant of the graph.
    if not torch.equal(rng_state, torch.get_rng_state()):
        raise ConfigError(
            f"{type(clone).__name__} draws random numbers whose shape does not depend on its input, so a trace would "
            "repeat the same numbers in every step; draw them in a module without children, or give model.layers"
        )
    return graph


@final
class _Tracer(fx.Tracer):
    # Without this, arithmetic on buffers would run once, during tracing, and its result would become a constant.
    proxy_buffer_attributes = True

    def __init__(self, leaves: Leaves, inputs: int) -> None:
        super().__init__()
        self._leaves = leaves
        self._inputs = inputs
        self.current_path = ""
        """The module whose forward is running. After an error it still names the module that raised."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._leaves.include(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        caller, self.current_path = self.current_path, self.path_of_module(m)
        output = super().call_module(m, forward, args, kwargs)
        self.current_path = caller  # not in a finally block: see current_path
        return output

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Make only the arguments of the sample inputs of the graph, so that `mask=None` stays None."""
        names = [
            parameter.name
            for parameter in inspect.signature(root_fn).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ][1:]
        names += [f"input_{index}" for index in range(len(names), self._inputs)]  # a forward that takes *args
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in names[: self._inputs]]
        return root_fn, [self.root, *proxies]


def _trace_error(error: Exception, model: nn.Module, path: str) -> str:
    module = model.get_submodule(path)
    subject = f"'{path}' ({type(module).__name__})" if path else type(model).__name__
    cure = (
        f"mark it as a leaf with model.leaves=[{path}], or give model.layers" if path else "give model.layers"
    )
    reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
    # The innermost line that is neither torch's nor this file's is the model's own.
    frames = list(traceback.extract_tb(error.__traceback__))
    outside_torch = [frame for frame in frames if not Path(frame.filename).is_relative_to(_TORCH)]
    frame = ([frame for frame in outside_torch if frame.filename != __file__] or frames)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{subject} cannot be traced: {frame.filename}:{frame.lineno} `{line}`: {reason}; {cure}"
