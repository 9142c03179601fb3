"""Thread-local state of torch without a public name: modes, and hooks on saved tensors.

A TorchDispatchMode or TorchFunctionMode of the caller, such as FlopCounterMode, sees the operators of its own thread.
Pushed onto the stacks of the threads that work for the caller, it sees theirs too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

SavedTensorsHooks: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]


def current_saved_tensors_hooks() -> SavedTensorsHooks | None:
    """The innermost pair of torch.autograd.graph.saved_tensors_hooks: torch runs no other."""
    hooks: SavedTensorsHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def active_transform(tensors: Callable[[], Iterable[Tensor]]) -> str | None:
    """What transforms or traces the code of this thread, which no other thread takes part in; None without any.

    tensors: those that forward-mode AD may have given tangents.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    # Not torch.jit.is_tracing, which takes a quarter of a millisecond.
    if torch._C._get_tracing_state() is not None or torch.compiler.is_compiling():
        return "tracing"
    if forward_ad._current_level < 0:
        return None
    unpacked = map(forward_ad.unpack_dual, tensors())
    has_tangents = any(each.tangent is not None for each in unpacked)
    return "forward-mode AD" if has_tangents else None


@final
@dataclass(frozen=True, slots=True)
class CallerModes:
    dispatch: tuple[TorchDispatchMode, ...] = ()
    function: tuple[TorchFunctionMode, ...] = ()
    _turn: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def capture(cls) -> CallerModes | None:
        """The modes of this thread; None if there are none, which is the usual case."""
        dispatch = range(torch._C._len_torch_dispatch_stack())
        function = range(torch._C._len_torch_function_stack())
        if not dispatch and not function:
            return None
        modes = cls(
            tuple(torch._C._get_dispatch_stack_at(place) for place in dispatch),
            # The default device is a mode as well, but part of the caller's state.
            tuple(
                mode
                for mode in map(torch._C._get_function_stack_at, function)
                if not isinstance(mode, DeviceContext)
            ),
        )
        return modes if modes.dispatch or modes.function else None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager. Modes are made for one thread, and most of them count, so threads take turns."""
        with self._turn, contextlib.ExitStack() as stack:
            for mode in self.dispatch:
                _push_mode(mode)
                stack.callback(_pop_mode, getattr(mode, "_mode_key", None))
            for function_mode in self.function:
                torch._C._push_on_torch_function_stack(function_mode)
                stack.callback(torch._C._pop_torch_function_stack)
            yield
