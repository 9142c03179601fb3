from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.engines.state import EngineState, OptimizerState, check_optimizer, load_module, module_state
from gpipe_cli.errors import ConfigError, RunError


def trained(make: Any, steps: int = 3) -> tuple[nn.Linear, torch.optim.Optimizer, OptimizerState]:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    optimizer = make(module.parameters())
    names = {parameter: name for name, parameter in module.named_parameters()}
    state = OptimizerState(optimizer, names, make)
    for _ in range(steps):
        step(module, optimizer)
    return module, optimizer, state


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
        lambda parameters: torch.optim.ASGD(parameters, lr=0.01),
        lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
        lambda parameters: torch.optim.Adadelta(parameters, lr=0.01),
        lambda parameters: torch.optim.RAdam(parameters, lr=0.01),
        lambda parameters: torch.optim.Adamax(parameters, lr=0.01),
        lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    ],
)
def test_an_optimizer_goes_on_as_if_nothing_had_happened(make: Any) -> None:
    check_optimizer(make)
    module, optimizer, state = trained(make)
    other, fresh, restored = trained(make, steps=0)
    tensors, numbers = state.take()
    restored.put({name: tensor.clone() for name, tensor in tensors.items()}, numbers)
    other.load_state_dict(module.state_dict())
    for _ in range(2):
        step(module, optimizer)
        step(other, fresh)
    assert torch.equal(module.weight, other.weight) and torch.equal(module.bias, other.bias)
    before, now = state.take()[0], restored.take()[0]
    assert before.keys() == now.keys() and all(torch.equal(before[name], now[name]) for name in before)


class Fine(torch.optim.SGD):
    """Keeps more digits than its parameter has, and something in its group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["turns"] = group.get("turns", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["sum"] = state.get("sum", torch.zeros((), dtype=torch.float64)) + 0.1
                state["count"] = state.get("count", 0) + 1


def test_state_keeps_its_own_precision_numbers_and_moved_settings() -> None:
    _, _, state = trained(lambda parameters: Fine(parameters, lr=0.1))
    tensors, numbers = state.take()
    assert numbers == {
        "state": {"weight": {"count": 3}, "bias": {"count": 3}},
        "groups": [{"turns": 3}],
    }
    _, fresh, restored = trained(lambda parameters: Fine(parameters, lr=0.1), steps=0)
    restored.put(tensors, numbers)
    assert [state["sum"].dtype for state in fresh.state.values()] == [torch.float64] * 2
    assert restored.take()[1] == numbers


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = [object()]


def test_what_cannot_be_saved_is_told_before_training() -> None:
    with pytest.raises(ConfigError, match=r"Odd: its state 'history' is a list, which cannot be saved"):
        check_optimizer(lambda parameters: Odd(parameters, lr=0.1))


def test_an_optimizer_that_cannot_be_tried_out_is_left_to_training() -> None:
    check_optimizer(lambda parameters: torch.optim.LBFGS(parameters))


@pytest.mark.parametrize(
    "numbers",
    [{}, {"state": 3, "groups": [{}]}, {"state": {"weight": 1}, "groups": [{}]}, {"state": {}, "groups": []}],
)
def test_numbers_that_are_none_are_refused(numbers: dict[str, Any]) -> None:
    _, _, state = trained(lambda parameters: torch.optim.SGD(parameters, lr=0.1), steps=0)
    with pytest.raises(RunError, match="does not fit the optimizer"):
        state.put({}, numbers)


def test_state_of_a_parameter_that_is_not_there_is_refused() -> None:
    _, _, state = trained(lambda parameters: torch.optim.SGD(parameters, lr=0.1), steps=0)
    with pytest.raises(RunError, match="it trains no other"):
        state.put({"other/step": torch.ones(())}, {"state": {}, "groups": [{}]})


class Masked(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(2), persistent=False)


def test_buffers_that_a_state_dict_leaves_out_are_part_of_the_state() -> None:
    first, second = Masked(), Masked()
    first.mask.fill_(3)
    state = module_state(first)
    assert list(state.model) == [] and list(state.buffers) == ["mask"]
    load_module(second, state)
    assert torch.equal(second.mask, first.mask)
    with pytest.raises(RunError, match="does not fit the model: it has no buffer 'mask'"):
        load_module(second, EngineState({}))


def test_a_state_of_another_model_is_refused_by_name(parameters: Iterable[nn.Parameter] = ()) -> None:
    with pytest.raises(RunError, match=r"does not fit the model: .*weight"):
        load_module(nn.Linear(3, 2), EngineState({}))
