from __future__ import annotations

import pytest
import torch
from torch import distributed

from gpipe_cli.distributed.groups import backends_for, with_cpu_backend
from gpipe_cli.errors import ConfigError


def test_ranks_on_the_cpu_use_gloo() -> None:
    assert backends_for(torch.device("cpu")) == "gloo"


@pytest.mark.parametrize(("kind", "name"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_an_accelerator_has_its_own_backend_and_the_cpu_keeps_gloo(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "is_backend_available", lambda _: True)
    assert backends_for(torch.device(kind, 1)) == f"cpu:gloo,{kind}:{name}"


@pytest.mark.skipif(distributed.is_nccl_available(), reason="this build of torch has NCCL")
def test_a_backend_that_torch_was_built_without_is_named() -> None:
    says = r"devices: 'cuda:1' needs the backend nccl, which this build of torch does not have; use engine=threads"
    with pytest.raises(ConfigError, match=says):
        backends_for(torch.device("cuda", 1))


def test_a_type_of_device_without_a_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.distributed has no backend for the type 'mtia'"):
        backends_for(torch.device("mtia", 0))


def test_a_group_without_a_backend_for_the_cpu_gets_gloo() -> None:
    assert with_cpu_backend("cuda:nccl") == "cpu:gloo,cuda:nccl"
    assert with_cpu_backend("cpu:gloo,cuda:nccl") is None
