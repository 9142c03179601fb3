"""Dispatch and function modes: those of the caller in the threads that work for it, and modes that observe operators.

A TorchDispatchMode or TorchFunctionMode of the caller, such as FlopCounterMode, sees the operators of its own thread.
Pushed onto the stacks of the threads that work for the caller, it sees theirs too.
"""

from __future__ import annotations

import contextlib
import io
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from gpipe_cli.torch_internals.tensors import storage_of, tensors_in_tree

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


@final
class LiveBytes(TorchDispatchMode):
    """A context manager: `peak` is the most that tensors created inside took at the same time, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {storage_of(tensor) for tensor in tensors_in_tree((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in_tree(result):
            storage = tensor.untyped_storage()
            number = storage_of(tensor)
            # What an operator returns may be, or be a view of, what it was given.
            if number not in given and number not in self._live:
                self._live[number] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, number, None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def offers_sanitizer(device: torch.device) -> bool:
    """Whether torch can trace this device: builds for CUDA and ROCm can."""
    return device.type == "cuda" and (torch.version.cuda or torch.version.hip) is not None


def find_races(work: Callable[[], object]) -> list[str]:
    """Run the work; what the sanitizer reports about it, one line per race."""
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()  # type: ignore[no-untyped-call]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it prints what it raises, with long stack traces
            work()
    except _sanitizer.CUDASanitizerErrors as error:
        return [str(race).partition("\n")[0] for race in error.errors]
    finally:
        _sanitizer.cuda_sanitizer.disable()  # type: ignore[no-untyped-call]
    return []
