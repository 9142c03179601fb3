"""Streams and events of an accelerator of any kind. A CPU has none: what it is asked to run has run on return."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpipe_cli.accelerator.devices import is_accelerator


def current_stream(device: torch.device) -> torch.Stream:
    """The calling thread's stream of an accelerator."""
    return torch.accelerator.current_stream(device)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until the accelerators among `devices` have run everything that any thread has queued."""
    for device in {device for device in devices if is_accelerator(device)}:
        torch.accelerator.synchronize(device)


def record_timing_event(device: torch.device) -> torch.Event:
    """An event on the calling thread's stream of an accelerator, for `elapsed_time`."""
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event
