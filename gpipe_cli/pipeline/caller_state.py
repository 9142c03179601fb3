"""The thread-local state of the thread that calls a pipe, carried to the threads that run its layers.

Decides which state counts: the number of intra-op threads, grad mode, inference mode, autocast per device type, the
default device, hooks on saved tensors. Context variables and the dispatch and function modes, which backward sees as
well, are carried by `torch_internals.thread_modes`. Knows nothing of workers.
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
        """The caller's state for the forward of layers.

        The cast weights that autocast caches are shared by all threads and may have been cast without grad
        in a checkpointed forward; recomputation would find them there and lose their gradients. So nothing
        is cached.
        """
        # OpenMP counts per thread: one that was never asked for its number would multiply matrices with as
        # many threads as there are cores, to other bits, whatever the process was told.
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            if self.saved_tensors_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks))
            yield

    def without_autocast(self) -> contextlib.AbstractContextManager[object]:
        """For backward, whose ops must run in the types of their forward and not be cast again."""
        if not self.autocast:
            return _NO_AUTOCAST
        stack = contextlib.ExitStack()
        for kind, _ in self.autocast:
            stack.enter_context(torch.autocast(kind, enabled=False))
        return stack
