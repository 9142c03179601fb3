from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gpipe_cli.torch_internals import deferred_values
from gpipe_cli.torch_internals.deferred_values import (
    DeferredValues,
    NotDeferrable,
    tensors_in_attributes,
    without_values,
)

SEED = 3


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_values, "SMALL", 64)


def recorded(build: Callable[[], Any]) -> tuple[Any, DeferredValues]:
    values = DeferredValues()
    torch.manual_seed(SEED)
    with values.recording():
        return build(), values


def plain(build: Callable[[], Any]) -> Any:
    torch.manual_seed(SEED)
    return build()


def assert_same(given: list[Tensor], expected: list[Tensor]) -> None:
    assert len(given) == len(expected) and not any(tensor.is_meta for tensor in given)
    for left, right in zip(given, expected, strict=True):
        assert torch.equal(left, right) and left.stride() == right.stride() and type(left) is type(right)
        assert (left.dtype, left.requires_grad, vars(left)) == (right.dtype, right.requires_grad, vars(right))
    assert shared(given) == shared(expected)


def shared(tensors: list[Tensor]) -> list[int]:
    """For each tensor the first that it shares memory with."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [storages.index(storage) for storage in storages]


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))


def initializers() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(8)), nn.Conv2d(4, 4, 3))
    nn.init.trunc_normal_(model[0].weight)  # draws again where a value is outside of the bounds
    nn.init.trunc_normal_(model[1].weight, std=2)
    nn.init.orthogonal_(model[2].weight)
    nn.init.sparse_(model[3].weight, 0.3)
    nn.init.eye_(model[4].weight)
    nn.init.xavier_normal_(model[5].weight, generator=torch.Generator().manual_seed(5))
    nn.init.dirac_(model[8].weight)
    return model


def written_in_place() -> nn.Module:
    model = linears()
    with torch.no_grad():
        model[0].weight.mul_(2).clamp_(max=0.1)
        model[1].weight[3] = 7
        model[1].weight[torch.tensor([1, 2]), 5] = 0.5
        model[1].weight[4:6, ::2].uniform_()
        model[1].weight.copy_(model[1].weight.t().clone())
        model[1].weight.copy_(model[1].weight)
        model[2].weight.copy_(model[0].weight)
        model[0].weight.zero_()
        model[3].bias.fill_(model[2].weight.std().item())
        model[3].weight.data = model[2].weight.data * 3
    return model


def of_values() -> nn.Module:
    """Computes Python numbers and further tensors from large tensors."""
    model = linears()
    model.scale = float(model[0].weight.detach().abs().max())
    model.register_buffer("mask", torch.tril(torch.ones(12, 12)), persistent=False)
    model.register_buffer("chosen", model[1].weight[model[1].weight > 0].detach())
    model.tables = [torch.outer(torch.arange(12.0), torch.arange(12.0)).sin(), {"order": torch.randperm(100)}]
    model.is_on_cpu = model[0].weight.device.type == "cpu" and not model[0].weight.is_meta
    return model


def tied() -> nn.Module:
    model = linears()
    model[3].weight = model[0].weight
    model[2].weight = nn.Parameter(model[1].weight.data.t(), requires_grad=False)
    model[1].weight.marked = True  # type: ignore[attr-defined]
    model.rows = model[0].weight.detach()[3:]
    return model


def of_other_modules() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.LSTM(8, 8), nn.Embedding(30, 8, padding_idx=2))
    model.append(copy.deepcopy(model[2]))
    model.append(parametrizations.spectral_norm(nn.Linear(12, 12)))
    model.append(parametrizations.weight_norm(nn.Linear(12, 12)))
    model.append(parametrizations.orthogonal(nn.Linear(12, 12)))
    return model.to(torch.bfloat16).to("cpu")


BUILDS = [linears, initializers, written_in_place, of_values, tied, of_other_modules]


@pytest.mark.parametrize("in_memory", [0, 2**28])
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_every_tensor_gets_the_value_of_a_plain_model(
    build: Callable[[], nn.Module], in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_values, "MAX_BYTES_IN_MEMORY", in_memory)
    expected = plain(build)
    drawn = torch.rand(3)
    model, values = recorded(build)
    assert torch.equal(torch.rand(3), drawn), "the generator advances as in a plain model"
    tensors = tensors_in_attributes(model.modules())
    assert any(tensor.is_meta for tensor in tensors) and not values.in_use(tensors)
    values.fill(reversed(tensors))
    assert_same(tensors, tensors_in_attributes(expected.modules()))
    for name in ("scale", "is_on_cpu"):
        assert getattr(model, name, None) == getattr(expected, name, None)


def test_only_what_is_filled_gets_memory_and_drawing_it_changes_no_other_numbers() -> None:
    model, values = recorded(linears)
    state = torch.get_rng_state()
    values.fill(model[2].parameters())
    assert [layer.weight.is_meta for layer in model] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[2].weight, plain(linears)[2].weight)
    assert torch.equal(values.value_of(model[0].weight), plain(linears)[0].weight) and model[0].weight.is_meta


def test_loaded_weights_are_read_only_for_what_is_filled() -> None:
    state = plain(linears).state_dict()

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
        torch.randn(5)
        model.load_state_dict(state)
        return model

    model, values = recorded(build)
    assert all(layer.weight.is_meta for layer in model)
    values.fill(model.parameters())
    assert_same(list(model.state_dict().values()), list(state.values()))


def test_code_that_needs_the_memory_itself_is_refused() -> None:
    for use in (Tensor.numpy, Tensor.data_ptr, Tensor.tolist, lambda tensor: tensor.resize_(30, 30)):
        with pytest.raises(NotDeferrable, match="memory"):
            recorded(lambda use=use: use(torch.empty(12, 12)))
    with pytest.raises(NotDeferrable, match="with one that has no values"):
        recorded(lambda: torch.empty(12, 12).copy_(torch.empty(12, 12, device="meta")))


def test_a_large_source_that_changes_later_is_refused() -> None:
    source = torch.ones(12, 12)

    def build() -> Tensor:
        tensor = torch.empty(12, 12).copy_(source)
        source.mul_(2)
        return tensor

    with pytest.raises(NotDeferrable, match="changed after others were computed from it"):
        recorded(build)


def test_a_tensor_that_is_no_attribute_is_counted() -> None:
    kept: list[Tensor] = []

    def build() -> nn.Module:
        kept.append(torch.rand(12, 12))
        return linears()

    model, values = recorded(build)
    assert values.in_use(tensors_in_attributes(model.modules())) == 1


def test_tensors_that_are_meant_to_be_on_meta_stay_there() -> None:
    def build() -> list[Tensor]:
        large = torch.rand(12, 12)
        return [torch.empty(12, 12, device="meta"), torch.empty_like(large, device="meta"), large]

    (first, second, large), values = recorded(build)
    assert [values.includes(tensor) for tensor in (first, second, large)] == [False, False, True]


def test_what_is_large_has_no_storage_and_what_is_small_has_values() -> None:
    with without_values():
        layer = nn.Linear(1000, deferred_values.SMALL)
        widths = torch.linspace(0, 1, 5).tolist()
        large = [torch.randn(1000, 1000), torch.full((1 << 17,), 2.0), torch.rand(1 << 17, device="cpu")]
        drawn = torch.randn(1 << 17, generator=torch.Generator())
    assert layer.weight.is_meta and not layer.bias.is_meta
    assert widths == [0, 0.25, 0.5, 0.75, 1]
    assert all(tensor.is_meta for tensor in (*large, drawn))
    assert not torch.zeros(1 << 17).is_meta


def test_what_has_no_storage_is_not_filled_and_what_has_is() -> None:
    with without_values():
        large, small = torch.empty(1 << 17), torch.empty(8)
        for tensor in (large, small):
            assert nn.init.kaiming_normal_(tensor.view(2, -1)).shape == (2, tensor.numel() // 2)
            assert nn.init.trunc_normal_(tensor) is tensor and tensor.fill_(3.0) is tensor
    assert large.is_meta and torch.equal(small, torch.full((8,), 3.0))
