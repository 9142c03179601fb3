"""deterministic=true: equal operations on equal numbers give bitwise identical results, on accelerators too.

The settings apply to the whole process and to the libraries that torch calls: kernels that add in a fixed order, no
choice of kernels by benchmark, and full 32-bit precision.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import deterministic as torch_deterministic

from gpipe_cli.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
SUITABLE_WORKSPACES = (":4096:8", ":16:8")
"""Sizes with which cuBLAS always finds the same workspace, and therefore takes the same algorithm."""
backends: Any = torch.backends  # torch makes some of its attributes at run time, where mypy does not see them
# The precision of each library by itself: a value that a user's code has set for one of them wins over a common one.
SETTINGS: tuple[tuple[Any, str, Any], ...] = (
    (backends.cuda.matmul, "fp32_precision", "ieee"),
    (backends.cudnn.conv, "fp32_precision", "ieee"),
    (backends.cudnn.rnn, "fp32_precision", "ieee"),
    (backends.mkldnn.matmul, "fp32_precision", "ieee"),
    (backends.mkldnn.conv, "fp32_precision", "ieee"),
    (backends.mkldnn.rnn, "fp32_precision", "ieee"),
    (backends.cudnn, "benchmark", False),
    (backends.cudnn, "deterministic", True),
    # Filling new memory helps to find code that reads it too early. It would cost a pass over every buffer, and write
    # it in the current stream, which need not be the stream that writes the buffer next.
    (torch_deterministic, "fill_uninitialized_memory", False),
)
NOT_DETERMINISTIC = re.compile(r"^(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic_algorithms(*, enabled: bool) -> Iterator[None]:
    """Run the block with deterministic algorithms if `enabled`; enter it before the first use of an accelerator."""
    if not enabled:
        yield
        return
    with report_nondeterministic_operator(), _workspace(), _settings():
        yield


@contextmanager
def report_nondeterministic_operator() -> Iterator[None]:
    """Turn torch's error over an operator without a deterministic kernel into one line, with the notes on the layer."""
    try:
        yield
    except RuntimeError as error:
        operator = NOT_DETERMINISTIC.search(str(error))
        if operator is None:
            raise
        refusal = ConfigError(
            f"deterministic=true: torch has no deterministic kernel for the operator {operator[1]} on this device; "
            "replace the operator in the layer, or set deterministic=false"
        )
        for note in getattr(error, "__notes__", ()):
            refusal.add_note(note)
        raise refusal from error


@contextmanager
def _workspace() -> Iterator[None]:
    given = os.environ.get(WORKSPACE)
    if given is not None and given not in SUITABLE_WORKSPACES:
        raise ConfigError(
            f"deterministic=true: the environment variable {WORKSPACE} is {given}; unset it, or set it to "
            f"{' or '.join(SUITABLE_WORKSPACES)}"
        )
    # cuBLAS reads it when torch creates the first handle of a device, not when the process starts.
    os.environ.setdefault(WORKSPACE, SUITABLE_WORKSPACES[0])
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(WORKSPACE, None)


@contextmanager
def _settings() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    with ExitStack() as assigned:
        for settings, name, value in SETTINGS:
            assigned.callback(setattr, settings, name, getattr(settings, name))
            setattr(settings, name, value)
        torch.use_deterministic_algorithms(True)
        assigned.callback(torch.set_deterministic_debug_mode, before)
        yield
