from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.accelerator.determinism import SETTINGS, WORKSPACE, deterministic_algorithms
from gpipe_cli.errors import ConfigError
from tests.support.broken_models import Scatter


@pytest.fixture(autouse=True)
def without_workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACE, raising=False)
    yield


def state() -> list[object]:
    values = [getattr(settings, name) for settings, name, _ in SETTINGS]
    return [*values, torch.get_deterministic_debug_mode(), os.environ.get(WORKSPACE)]


def test_everything_is_as_it_was_afterwards() -> None:
    before = state()
    with pytest.raises(ValueError, match="broken"), deterministic_algorithms(enabled=True):
        assert [getattr(settings, name) for settings, name, _ in SETTINGS] == [
            value for _, _, value in SETTINGS
        ]
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ[WORKSPACE] == ":4096:8"
        raise ValueError("broken")
    assert state() == before


def test_without_it_nothing_changes() -> None:
    before = state()
    with deterministic_algorithms(enabled=False):
        assert state() == before


def test_a_suitable_workspace_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    with deterministic_algorithms(enabled=True):
        assert os.environ[WORKSPACE] == ":16:8"
    assert os.environ[WORKSPACE] == ":16:8"


def test_another_workspace_of_the_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":4096:2:16:8")
    before = state()
    with (
        pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG is :4096:2:16:8; unset it, or set it to"),
        deterministic_algorithms(enabled=True),
    ):
        pass
    assert state() == before


def test_an_operator_without_a_deterministic_kernel_is_named_with_its_layer() -> None:
    module = nn.Sequential(nn.Linear(2, 2), Scatter())
    with (
        pytest.raises(
            ConfigError, match=r"deterministic=true: .* the operator put_ on this device; replace"
        ) as raised,
        deterministic_algorithms(enabled=True),
        GPipe(module, [1, 1], devices=["cpu", "cpu"]) as pipe,
    ):
        pipe.step(torch.ones(2, 2), torch.ones(2, 2), functional.mse_loss, key=0)
    assert "layer '1' (Scatter)" in raised.value.__notes__[0]
