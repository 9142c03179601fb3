"""The thread-local state of the caller, re-entered by the threads that run its layers.

Context variables, and the dispatch and function modes that backward sees as well, are in
`torch_internals.thread_modes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch

from gpipe_cli.torch_internals.thread_modes import SavedTensorsHooks, current_saved_tensors_hooks

_NO_AUTOCAST = contextlib.nullcontext()


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
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
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
                # All threads share autocast's cache of cast weights. A checkpointed forward would cast them without
                # grad, and recompute would find those and lose their gradients.
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            if self.saved_tensors_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks))
            yield

    def without_autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context manager for backward: its ops must run in the dtypes of the forward."""
        if not self.autocast:
            return _NO_AUTOCAST
        stack = contextlib.ExitStack()
        for kind, _ in self.autocast:
            stack.enter_context(torch.autocast(kind, enabled=False))
        return stack
