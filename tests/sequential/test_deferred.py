"""Parameters in files are read where they are needed, once, and keep their names, ties and requires_grad."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpipe_cli.sequential.deferred import DeferredParameter, load_parameters, read_from

CPU = torch.device("cpu")


def unload(module: nn.Module, read: list[str]) -> dict[str, Tensor]:
    """Take the values out of a module; `read` gets the name of each that is read again."""
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    names = {parameter: name for name, parameter in module.named_parameters()}
    unloaded = {
        parameter: DeferredParameter.like(
            parameter, lambda name=name: (read.append(name), values[name].clone())[1]
        )
        for parameter, name in names.items()
    }
    for part in module.modules():
        for key, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, key, unloaded[parameter])
    return values


def tied_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def test_only_the_parameters_of_the_users_are_read_each_once() -> None:
    model, read = tied_model(), list[str]()
    values = unload(model, read)
    assert all(parameter.is_meta for parameter in model.parameters())
    load_parameters([model], CPU, [model[0]])
    assert read == ["0.weight", "0.bias"]
    assert model[3].weight is model[0].weight, "a tie reaches beyond the users"
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
