from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a machine with an accelerator: the names of the threads that pinned a tensor."""
    threads: list[str] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        threads.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    return threads
