"""Parameters in files are read where they are needed, once, and keep their names, ties and requires_grad."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.sequential.deferred import (
    DeferredParameter,
    defer_parameters,
    fill_others,
    load_parameters,
    meta_like,
    read_from,
)
from gpipe_cli.torch_internals import deferred_values
from gpipe_cli.torch_internals.deferred_values import DeferredValues, replace_value

CPU = torch.device("cpu")


def unload(module: nn.Module, read: list[str]) -> dict[str, Tensor]:
    """Take the values out of a module; `read` gets the name of each that is read again."""
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        DeferredParameter.of(parameter, lambda name=name: (read.append(name), values[name].clone())[1])
        replace_value(parameter, meta_like(parameter))
    return values


def tied_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def test_only_the_parameters_that_are_asked_for_are_read_each_once() -> None:
    model, read = tied_model(), list[str]()
    values = unload(model, read)
    assert all(parameter.is_meta for parameter in model.parameters())
    load_parameters([model[0]], CPU)
    assert read == ["0.weight", "0.bias"]
    assert model[3].weight is model[0].weight, "a tie reaches other modules"
    assert model[2].weight.is_meta and model[3].bias.is_meta
    load_parameters([model], CPU)
    assert sorted(read) == sorted(values)
    assert all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["2.bias"]
    assert not any(isinstance(parameter, DeferredParameter) for parameter in model.parameters())


def test_a_snapshot_takes_the_place_of_the_files() -> None:
    model, read = tied_model(), list[str]()
    unload(model, read)
    snapshot = {name: torch.full(p.shape, 7.0, dtype=torch.float64) for name, p in model.named_parameters()}
    read_from(model, snapshot)
    load_parameters([model], CPU)
    assert not read
    assert all(p.eq(7).all() and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("in_memory", [0, 2**18, 2**30])
def test_large_parameters_are_computed_one_by_one_and_buffers_at_once(
    in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers are initialized twice, the second time from the last to the first, and with views."""
    monkeypatch.setattr(deferred_values, "MAX_BYTES_IN_MEMORY", in_memory)
    monkeypatch.setattr(deferred_values, "SMALL", 2**12)

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(150, 150) for _ in range(4)), nn.LSTM(40, 40))
        for layer in reversed(model[:4]):
            nn.init.trunc_normal_(layer.weight)
            with torch.no_grad():
                layer.weight[3].fill_(0.5)
                layer.weight.mul_(2)
        model.register_buffer("mask", torch.rand(200, 200))
        return model

    plain, values = build(), DeferredValues()
    with values.recording():
        model = build()
    defer_parameters(model, values)
    fill_others([model], values)
    assert torch.equal(model.mask, plain.mask)
    load_parameters([model[2]], CPU)
    deferred = [name for name, p in model.named_parameters() if isinstance(p, DeferredParameter)]
    assert deferred == ["0.weight", "1.weight", "3.weight", "4.weight_ih_l0", "4.weight_hh_l0"]
    load_parameters([model], CPU)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    input = torch.rand(2, 3, 40)
    assert torch.equal(model[4](input)[0], plain[4](input)[0]), "the LSTM has them in a list, too"
