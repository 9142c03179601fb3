"""What torch keeps private about modules: calls seen from outside, and the version of their saved state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

_replacing = threading.Lock()
"""Held while methods of torch are replaced: two threads would restore each other's replacements."""

_MAX_COMPILED = 1024
"""Versions of a function, for layers that differ and for inputs of different sizes."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def runs_more_than_forward(module: nn.Module) -> bool:
    """Whether a call of the module does more than its forward says: hooks, or code compiled from it."""
    is_compiled = getattr(module, "_compiled_call_impl", None) is not None
    return (
        is_compiled
        or hasattr(module, "_torchdynamo_orig_callable")
        or any(getattr(module, name) for name in _HOOKS)
    )


def without_function_modes() -> AbstractContextManager[None]:
    """Inside, tensors behave as if no TorchFunctionMode was active."""
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return disabled


@contextmanager
def intercept_calls(call_module: Callable[..., Any], apply_function: Callable[..., Any]) -> Iterator[None]:
    """Replace nn.Module.__call__ and torch.autograd.Function.apply for this thread.

    The replacements receive the original as their first argument. Scripted functions run as the Python functions that
    they were compiled from, so that their calls are visible.
    """
    thread = threading.get_ident()
    with _replacing:
        yield from _replaced(thread, call_module, apply_function)


def _replaced(
    thread: int, call_module: Callable[..., Any], apply_function: Callable[..., Any]
) -> Iterator[None]:
    module_call, function_apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    script_call = torch.jit.ScriptFunction.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return module_call(module, *args, **kwargs)
        return call_module(module_call, module, *args, **kwargs)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        original = function_apply.__get__(None, cls)
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        return apply_function(original, *args, **kwargs)

    def call_script(function: Any, *args: Any, **kwargs: Any) -> Any:
        source = getattr(function, "_torchdynamo_inline", None)
        if source is None or threading.get_ident() != thread:
            return script_call(function, *args, **kwargs)
        return source(*args, **kwargs)

    torch.jit.ScriptFunction.__call__ = call_script  # type: ignore[method-assign,assignment]
    nn.Module.__call__ = call  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.jit.ScriptFunction.__call__ = script_call  # type: ignore[method-assign]
        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = function_apply  # type: ignore[method-assign]


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Let torch compile each layer at its first call; what equal layers do is compiled once.

    A layer that cannot be compiled whole raises, and so does one that would have to run uncompiled after all: what a
    layer computes must depend on nothing but its input. Code for sizes that vary would depend on the sizes before.
    """
    torch._dynamo.config.recompile_limit = _MAX_COMPILED
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers:
        of_torch = type(layer).__module__.startswith("torch.nn.")
        # One kernel, which is what torch's modules without children run, has nothing to be joined with.
        if not of_torch or any(layer.children()):
            # torch compiles the forward of its own modules, such as Sequential, only if another function calls it.
            with torch._dynamo.config.patch(wrap_top_frame=of_torch):
                layer.compile(fullgraph=True, dynamic=False)


def adopt_version(module: nn.Module, original: nn.Module) -> None:
    """Make state that `module` saves carry the version of `original`, by which its loader may convert older state."""
    module._version = original._version


def repeat_versions(state_dict: dict[str, Any], prefix: str, original_path: Callable[[str], str]) -> None:
    """Add the version of each module below `prefix` under its original path too."""
    versions: dict[str, Any] = getattr(state_dict, "_metadata", {})
    for path in [path for path in versions if path.startswith(prefix) and path != prefix]:
        versions.setdefault(prefix + original_path(path.removeprefix(prefix)), versions[path])
