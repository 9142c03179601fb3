"""The state in which a layer runs: what the thread works on, and the thread-local state of the caller.

Workers re-enter the caller's state. Context variables, and the dispatch and function modes that backward sees as well,
are in `torch_internals.dispatch_modes`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch

from gpipe_cli.torch_internals.dispatch_modes import SavedTensorsHooks, current_saved_tensors_hooks


@final
class MicroBatch:
    """One slice of one mini-batch. Compared by identity, so it can be a dictionary key or a weak reference."""

    __slots__ = ("__weakref__", "index", "size")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size

    def __repr__(self) -> str:
        return f"MicroBatch(index={self.index}, size={self.size})"


class _RunningState(threading.local):
    micro_batch: MicroBatch | None = None
    checkpointing: bool = False
    recomputing: bool = False


_current = _RunningState()


def current_microbatch() -> MicroBatch | None:
    """The micro-batch that a layer is working on, the same object in forward and recompute; None outside a pipe."""
    return _current.micro_batch


def is_checkpointing() -> bool:
    """True in the first forward of a checkpointed micro-batch, whose activations are dropped."""
    return _current.checkpointing


def is_recomputing() -> bool:
    """True in the second forward of a checkpointed micro-batch. Count and print only while it is False."""
    return _current.recomputing


@final
class Running:
    """Context manager: sets what `current_microbatch` and the others return."""

    __slots__ = ("_before", "_now")

    def __init__(
        self, micro_batch: MicroBatch, checkpointing: bool = False, recomputing: bool = False
    ) -> None:
        self._now = (micro_batch, checkpointing, recomputing)

    def __enter__(self) -> None:
        # A pipe may be a layer of another pipe in the same thread: restore what was there.
        self._before = (_current.micro_batch, _current.checkpointing, _current.recomputing)
        _current.micro_batch, _current.checkpointing, _current.recomputing = self._now

    def __exit__(self, *exception: object) -> None:
        _current.micro_batch, _current.checkpointing, _current.recomputing = self._before


_NOTHING = contextlib.nullcontext()


@final
@dataclass(frozen=True, slots=True)
class CallerState:
    threads: int
    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    device: torch.device
    saved_tensors_hooks: SavedTensorsHooks | None

    @classmethod
    def capture(cls) -> CallerState:
        accelerator = torch.accelerator.current_accelerator()
        kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        return cls(
            threads=torch.get_num_threads(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
            ),
            device=torch.get_default_device(),
            saved_tensors_hooks=current_saved_tensors_hooks(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager: the caller's state, for the forward of layers."""
        # OpenMP keeps the number of threads per thread: one that never set it would use all cores, with other bits.
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                # All threads share autocast's cache of cast weights, and with it the graph of the cast: the backward
                # of one micro-batch would free it for the others.
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            if self.saved_tensors_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks))
            yield

    def without_autocast_cache(self) -> contextlib.AbstractContextManager[object]:
        """Context manager for the thread of the caller, which is in this state already, but may cache cast weights."""
        return self.entered() if self.autocast else _NOTHING

    def without_autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context manager for backward: its ops must run in the dtypes of the forward."""
        if not self.autocast:
            return _NOTHING
        stack = contextlib.ExitStack()
        for kind, _ in self.autocast:
            stack.enter_context(torch.autocast(kind, enabled=False))
        return stack
