"""A state that was not made by this model and this optimizer is refused when it is loaded, not at the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.engines.state import EngineState, OptimizerState, check_scaler, load_module, merged_numbers
from gpipe_cli.errors import RunError

MAKE: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


class Half(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)


def trained(make: Any, steps: int, module: nn.Module | None = None) -> OptimizerState:
    module = Half() if module is None else module
    optimizer = make(module.parameters())
    names = {parameter: name for name, parameter in module.named_parameters()}
    state = OptimizerState(optimizer, names, make)
    for _ in range(steps):
        optimizer.zero_grad()
        module.used(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return state


class Moving(torch.optim.SGD):
    """One that is not torch's own may change its settings."""


Change = Callable[[dict[str, Tensor]], object]


def renamed(tensors: dict[str, Tensor], name: str, other: str) -> None:
    tensors[other] = tensors.pop(name)


CHANGES: dict[str, tuple[str, Change, str]] = {
    "transposed": (
        "adamw",
        lambda t: t.update({"used.weight/exp_avg": torch.zeros(3, 2)}),
        r"used.weight/exp_avg is 3x2 of float32 instead of 2x3",
    ),
    "retyped": (
        "sgd",
        lambda t: t.update({"used.weight/momentum_buffer": torch.zeros(2, 3, dtype=torch.int32)}),
        r"momentum_buffer is 2x3 of int32 instead of 2x3 of float32",
    ),
    "of another precision": (
        "adamw",
        lambda t: t.update({"used.bias/exp_avg": torch.zeros(2, dtype=torch.float64)}),
        r"used.bias/exp_avg is 2 of float64",
    ),
    "renamed": (
        "adamw",
        lambda t: renamed(t, "used.weight/exp_avg", "used.weight/exp_bvg"),
        r"it has no 'exp_avg' of used.weight; resume with the optimizer settings of the run, or give reset_opt",
    ),
    "missing": ("adamw", lambda t: t.pop("used.bias/step"), r"it has no 'step' of used.bias"),
    "missing altogether": ("sgd", lambda t: t.clear(), r"it has no 'momentum_buffer' of used.weight"),
    "extra": (
        "sgd",
        lambda t: t.update({"used.weight/extra": torch.ones(2)}),
        r"which keeps no 'extra' of used.weight",
    ),
    "of a row": (
        "adafactor",
        lambda t: t.update({"used.weight/row_var": torch.ones(3, 1)}),
        r"used.weight/row_var is 3x1 of float32 instead of 2x1",
    ),
    "a step before the first": (
        "adamw",
        lambda t: t.update({"used.bias/step": torch.tensor(-5.0)}),
        r"used.bias/step is -5",
    ),
    "a step that is none": (
        "adamw",
        lambda t: t.update({"used.bias/step": torch.tensor(float("nan"))}),
        r"used.bias/step is nan",
    ),
    "of a parameter without a gradient": (
        "sgd",
        lambda t: t.update({"unused.bias/momentum_buffer": torch.ones(2)}),
        r"its parameters without a state are",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_an_optimizer_state_that_is_not_its_own_is_refused_on_load(case: str) -> None:
    """Each of them was loaded, and ended in a RuntimeError of torch's at the first step, or in nothing at all."""
    name, change, says = CHANGES[case]
    tensors, numbers = trained(MAKE[name], 2).take()
    fresh = trained(MAKE[name], 0)
    fresh.put(tensors, numbers)
    change(tensors)
    with pytest.raises(RunError, match=f"does not fit the optimizer.*{says}"):
        fresh.put(tensors, numbers)


@pytest.mark.parametrize(
    ("moved", "says"),
    [
        ({"params": [0]}, "never changes 'params' itself"),
        ({"weight_decay": "x"}, "weight_decay is 'x', not a number"),
        ({"weight_decay": [1.0]}, "weight_decay is .*, not a number"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"nesterov": 1}, "nesterov is 1, not a truth value"),
    ],
)
def test_a_setting_of_another_kind_is_refused(moved: dict[str, Any], says: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return Moving(parameters, lr=0.01, momentum=0.9)

    tensors, numbers = trained(make, 1).take()
    trained(make, 0).put(tensors, {**numbers, "groups": [{"weight_decay": 0.1}]})
    with pytest.raises(RunError, match=says):
        trained(make, 0).put(tensors, {**numbers, "groups": [moved]})


@pytest.mark.parametrize("moved", [{"weight_decay": 7}, {"params": [0]}, {"lr": 1.0}, {"extra": 1}])
def test_a_setting_that_torchs_optimizers_do_not_change_is_not_taken_from_a_file(
    moved: dict[str, Any],
) -> None:
    """A record could give another weight_decay than the configuration, in silence."""
    tensors, numbers = trained(MAKE["sgd"], 1).take()
    with pytest.raises(RunError, match="does not fit the optimizer, which never changes"):
        trained(MAKE["sgd"], 0).put(tensors, {**numbers, "groups": [moved]})


def test_parameters_that_never_had_a_gradient_are_known_by_name_and_need_no_state() -> None:
    tensors, numbers = trained(MAKE["adamw"], 2).take()
    assert numbers["without_state"] == ["unused.weight", "unused.bias"]
    trained(MAKE["adamw"], 0).put(tensors, numbers)
    with pytest.raises(RunError, match=r"it has no 'exp_avg', .* of unused.weight"):
        trained(MAKE["adamw"], 0).put(tensors, {**numbers, "without_state": []})
    assert merged_numbers([numbers, numbers]) == numbers


def test_a_tensor_that_names_no_parameter_is_refused() -> None:
    """`extra`, without a parameter before it, passed for the parameter that stands in for none."""
    module = Half()
    stand_in = nn.Parameter(torch.zeros(0))
    names = {**{parameter: name for name, parameter in module.named_parameters()}, stand_in: ""}
    state = OptimizerState(MAKE["sgd"](module.parameters()), names, MAKE["sgd"])
    tensors, numbers = trained(MAKE["sgd"], 1).take()
    with pytest.raises(RunError, match="it trains no"):
        state.put({**tensors, "extra": torch.ones(2)}, numbers)


def test_an_optimizer_that_keeps_nothing_needs_nothing() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    tensors, numbers = trained(make, 2).take()
    assert (tensors, numbers) == ({}, {"state": {}, "groups": [{}]})
    trained(make, 0).put(tensors, numbers)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"weight": torch.zeros(2, 3, dtype=torch.int32)},
            "tensor weight is 2x3 of int32 instead of 2x3 of float32",
        ),
        ({"weight": torch.zeros(3, 2)}, "tensor weight is 3x2 of float32 instead of 2x3 of float32"),
        ({"extra": torch.zeros(2)}, "which has no tensor 'extra'"),
    ],
)
def test_a_tensor_of_another_dtype_or_shape_is_refused(change: dict[str, Tensor], says: str) -> None:
    """A model tensor relabeled I32, with a correct digest, was converted in silence."""
    module = nn.Linear(3, 2)
    before = module.weight.clone()
    with pytest.raises(RunError, match=says):
        load_module(module, EngineState({**nn.Linear(3, 2).state_dict(), **change}))
    assert torch.equal(module.weight, before)


def test_not_every_parameter_can_have_been_without_a_gradient() -> None:
    numbers = {"optimizer": {"state": {}, "groups": [{}], "without_state": ["weight", "bias"]}}
    state = EngineState(nn.Linear(3, 2).state_dict(), numbers=numbers)
    with pytest.raises(RunError, match="it has a state of no parameter at all"):
        load_module(nn.Linear(3, 2), state)
    load_module(nn.Linear(3, 2), replace(state, resets_optimizer=True))


def test_a_buffer_that_would_be_broadcast_is_refused() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.zeros(4), persistent=False)
    with pytest.raises(RunError, match="buffer mask is 1 of float32 instead of 4 of float32"):
        load_module(module, EngineState({}, {"mask": torch.ones(1)}))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e300, "x", None, True])
def test_a_loss_scale_that_is_none_is_refused(value: Any) -> None:
    own = torch.amp.GradScaler("cpu").state_dict()
    check_scaler(own, own)
    with pytest.raises(RunError, match="does not fit the loss scaler: scale is"):
        check_scaler(own, {**own, "scale": value})
    with pytest.raises(RunError, match="does not fit the loss scaler"):
        check_scaler(own, {"scale": value})
