"""What a model's forward does in one mode, as a torch.fx graph.

Decides what is recorded and what is said when recording fails. Knows nothing of layers.
"""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from torch import fx, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.by_tracing.leaves import Leaves

__all__ = ["trace"]

_TORCH = Path(torch.__file__).parent


def trace(clone: nn.Module, leaves: Leaves, inputs: int, training: bool) -> fx.Graph:
    """The graph of a call with `inputs` positional arguments; the other ones have their defaults."""
    tracer = _Tracer(leaves, inputs)
    state = torch.get_rng_state()
    try:
        graph = tracer.trace(clone.train(training))
    except Exception as error:  # a model's code, run with stand-ins for tensors, may raise anything
        raise ConfigError(_failure(error, clone, tracer.place)) from error
    if not torch.equal(state, torch.get_rng_state()):
        raise ConfigError(
            f"{type(clone).__name__} draws random numbers whose shape does not depend on its input, so they "
            "would be the same for ever; draw them in a module without children, or give model.layers"
        )
    return graph


@final
class _Tracer(fx.Tracer):
    # Otherwise arithmetic on buffers would be done once, while tracing.
    proxy_buffer_attributes = True

    def __init__(self, leaves: Leaves, inputs: int) -> None:
        super().__init__()
        self._leaves = leaves
        self._inputs = inputs
        self.place = ""
        """The module that runs; where one fails, it stays that one."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._leaves.include(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        outer, self.place = self.place, self.path_of_module(m)
        output = super().call_module(m, forward, args, kwargs)
        self.place = outer
        return output

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Only what the sample gives is an input: `mask=None` shall stay None."""
        names = [
            parameter.name
            for parameter in inspect.signature(root_fn).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ][1:]
        names += [f"input_{index}" for index in range(len(names), self._inputs)]
        given = [self.create_proxy("placeholder", name, (), {}) for name in names[: self._inputs]]
        return root_fn, [self.root, *given]


def _failure(error: Exception, model: nn.Module, path: str) -> str:
    module = model.get_submodule(path)
    subject = f"'{path}' ({type(module).__name__})" if path else type(model).__name__
    cure = (
        f"mark it as a leaf with model.leaves=[{path}], or give model.layers" if path else "give model.layers"
    )
    reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
    return f"{subject} cannot be traced: {_source_line(error)}: {reason}; {cure}"


def _source_line(error: Exception) -> str:
    """The innermost line outside torch: the model's own."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(_TORCH)]
    own = [frame for frame in own if frame.filename != __file__] or list(frames)
    frame = own[-1]
    text = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} `{text}`"
