"""A pipe as an nn.Module: names, hooks, children, and what may not be replaced."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from gpipe_cli import GPipe
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.sequential import to_sequential

pytestmark = pytest.mark.timeout(60)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Sequential(nn.Linear(4, 2)))


def make_pipe(plain: bool, module: nn.Sequential | None = None) -> Any:
    module = model() if module is None else module
    return plain_pipe(module, chunks=2) if plain else GPipe(module, [2, len(module) - 2], chunks=2)


both_pipes = pytest.mark.parametrize("plain", [False, True], ids=["GPipe", "plain_pipe"])


@both_pipes
def test_parameters_buffers_and_modules_are_found_by_their_names(plain: bool) -> None:
    """get_parameter("0.weight") was an AttributeError."""
    with make_pipe(plain) as pipe:
        assert pipe.get_parameter("0.weight") is pipe[0].weight
        assert pipe.get_parameter("3.0.bias") is pipe[3][0].bias
        assert pipe.get_buffer("1.running_mean") is pipe[1].running_mean
        assert pipe.get_submodule("3.0") is pipe[3][0]
        assert pipe.get_submodule("1") is pipe[1]
        for name, parameter in pipe.named_parameters():
            assert pipe.get_parameter(name) is parameter
        for name, buffer in pipe.named_buffers():
            assert pipe.get_buffer(name) is buffer
        with pytest.raises(AttributeError):
            pipe.get_parameter("9.weight")
        with pytest.raises(AttributeError):
            pipe.get_submodule("no_such_module")


class Model(nn.Module):
    """Tracing cuts its stem, and gives its own parameter to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3))
        self.stem = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))

    def forward(self, input: Tensor) -> Tensor:
        return self.stem(input + self.shift)


def test_what_a_traced_model_has_is_found_by_its_own_names() -> None:
    traced = Model()
    with make_pipe(False, to_sequential(traced, torch.ones(3, 3))) as pipe:
        for name, parameter in traced.named_parameters():
            assert pipe.get_parameter(name) is parameter
        assert pipe.get_buffer("stem.1.running_mean") is traced.stem[1].running_mean
        assert pipe.get_submodule("stem.2") is traced.stem[2]
        with pytest.raises(AttributeError, match="the model has parts in several layers at 'stem'"):
            pipe.get_submodule("stem")


class Bigger(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(2, 1)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.body(input))


@both_pipes
def test_inside_a_bigger_module_all_names_are_those_of_the_plain_sequence(plain: bool) -> None:
    """named_parameters said body.module.0.weight, state_dict body.0.weight."""
    expected, outer = Bigger(model()), Bigger(make_pipe(plain))
    names = [name for name, _ in expected.named_parameters()]
    assert names[0] == "body.0.weight"
    assert [name for name, _ in outer.named_parameters()] == names
    assert [name for name, _ in outer.named_buffers()] == [name for name, _ in expected.named_buffers()]
    assert list(outer.state_dict()) == list(expected.state_dict())
    outer.load_state_dict(expected.state_dict())
    expected.load_state_dict(outer.state_dict())
    assert outer.get_parameter("body.0.weight") is outer.body[0].weight
    assert outer.get_submodule("body.3.0") is outer.body[3][0]
    for (name, mine), theirs in zip(outer.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    with pytest.raises(RuntimeError, match=r"body\.0\.weight"):
        outer.load_state_dict({})
    outer.body.close()


@both_pipes
def test_a_bigger_module_trains_through_its_pipe(plain: bool) -> None:
    expected, outer = Bigger(model().eval()).double(), Bigger(make_pipe(plain).eval()).double()
    outer.load_state_dict(expected.state_dict())
    input = torch.randn(4, 3).double()
    for each in (expected, outer):
        each(input).pow(2).sum().backward()
    for (name, mine), (other, theirs) in zip(
        outer.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    outer.body.close()


@both_pipes
def test_a_functional_call_uses_the_parameters_it_is_given(plain: bool) -> None:
    with make_pipe(plain) as pipe:
        pipe.eval()
        input = torch.randn(4, 3)
        state = {name: torch.randn_like(leaf) for name, leaf in pipe.named_parameters()}
        before = {name: leaf.detach().clone() for name, leaf in pipe.named_parameters()}
        expected = torch.func.functional_call(model().eval(), state, (input,))
        for _ in range(2):
            torch.testing.assert_close(torch.func.functional_call(pipe, state, (input,)), expected)
        for name, leaf in pipe.named_parameters():
            assert torch.equal(leaf, before[name])


@both_pipes
def test_a_functional_call_gives_its_gradients_to_what_it_was_given(plain: bool) -> None:
    with make_pipe(plain) as pipe:
        pipe.eval()
        input = torch.randn(4, 3)
        results = []
        for each in (pipe, model().eval()):
            torch.manual_seed(3)
            state = {
                name: torch.randn(leaf.shape, requires_grad=True) for name, leaf in each.named_parameters()
            }
            torch.func.functional_call(each, state, (input,)).pow(2).sum().backward()
            results.append({name: leaf.grad for name, leaf in state.items()})
        for name, expected in results[1].items():
            torch.testing.assert_close(results[0][name], expected)
        assert all(leaf.grad is None for leaf in pipe.parameters())


@both_pipes
def test_an_averaged_model_averages_a_pipe(plain: bool) -> None:
    with make_pipe(plain) as pipe:
        averaged, expected = AveragedModel(pipe), AveragedModel(model())
        names = [name.removeprefix("module.") for name, _ in expected.named_parameters()]
        assert [name.removeprefix("module.") for name, _ in averaged.named_parameters()] == names
        plain_model = model()
        for factor in (1.0, 2.0, 4.0):
            for source, target in ((pipe, averaged), (plain_model, expected)):
                with torch.no_grad():
                    for leaf in source.parameters():
                        leaf.mul_(factor)
                target.update_parameters(source)
        for mine, theirs in zip(averaged.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        input = torch.randn(4, 3)
        torch.testing.assert_close(averaged.eval()(input), expected.eval()(input))
        averaged.load_state_dict(averaged.state_dict())


def register(place: Any, kind: str, hook: Callable[..., None]) -> Any:
    if kind == "forward":
        return place.register_forward_hook(lambda *args: hook())
    if kind == "pre":
        return place.register_forward_pre_hook(lambda *args: hook())
    if kind == "backward":
        return place.register_full_backward_hook(lambda *args: hook())
    return place.register_full_backward_pre_hook(lambda *args: hook())


@pytest.mark.parametrize("place", ["module", "partition 0", "partition 1"])
@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "backward pre"])
@pytest.mark.parametrize("call", ["step", "backward"])
def test_a_hook_on_the_sequence_or_on_a_partition_runs_or_is_refused(
    place: str, kind: str, call: str
) -> None:
    """It was accepted and never called."""
    ran: list[int] = []
    with GPipe(model(), [2, 2], chunks=2, checkpoint="never") as pipe:
        target = pipe.module if place == "module" else pipe.partitions[int(place[-1])]
        try:
            register(target, kind, lambda: ran.append(1))
        except (RuntimeError, TypeError, NotImplementedError) as error:
            assert "layer" in str(error), "the message says where to register it instead"
            return
        if call == "step":
            pipe.step(torch.ones(4, 3), torch.ones(4, 2), functional.mse_loss)
        else:
            pipe(torch.ones(4, 3)).sum().backward()
        assert ran


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "backward pre"])
def test_a_hook_on_the_pipe_itself_runs_once_per_call(kind: str) -> None:
    ran: list[int] = []
    with GPipe(model(), [2, 2], chunks=2) as pipe:
        register(pipe, kind, lambda: ran.append(1))
        pipe(torch.ones(4, 3, requires_grad=True)).sum().backward()
        assert ran == [1]


REPLACEMENTS: dict[str, Callable[[Any], None]] = {
    "by index in the sequence": lambda pipe: pipe.module.__setitem__(0, nn.Linear(3, 4)),
    "by name in the sequence": lambda pipe: setattr(pipe.module, "2", nn.ReLU()),
    "by appending": lambda pipe: pipe.module.append(nn.ReLU()),
    "by deleting": lambda pipe: pipe.module.__delitem__(3),
    "the sequence itself": lambda pipe: setattr(pipe, "module", model()),
}


@both_pipes
@pytest.mark.parametrize("way", REPLACEMENTS)
@pytest.mark.parametrize("call", ["step", "forward"])
def test_a_layer_replaced_after_construction_is_an_error(way: str, call: str, plain: bool) -> None:
    """The pipe went on with the old layer, whose parameters no optimizer saw any more."""
    with make_pipe(plain) as pipe:
        pipe(torch.ones(4, 3))

        def replace_and_call() -> None:
            REPLACEMENTS[way](pipe)
            if call == "step":
                pipe.step(torch.ones(4, 3), torch.ones(4, 2), functional.mse_loss)
            else:
                pipe(torch.ones(4, 3))

        with pytest.raises((RuntimeError, TypeError, AttributeError, ValueError)) as caught:
            replace_and_call()
        assert "layer" in str(caught.value) or "replace" in str(caught.value)


def test_a_layer_replaced_in_a_partition_is_an_error() -> None:
    with GPipe(model(), [2, 2], chunks=2) as pipe:
        pipe(torch.ones(4, 3))
        with pytest.raises((RuntimeError, TypeError, AttributeError, ValueError)):
            pipe.partitions[0][0] = nn.Linear(3, 4)
            pipe(torch.ones(4, 3))


@both_pipes
def test_what_is_inside_a_layer_may_be_replaced(plain: bool) -> None:
    """LoRA and its like change layers from within; the pipe sees it."""
    with make_pipe(plain) as pipe:
        pipe.eval()
        input = torch.randn(4, 3)
        pipe(input)
        pipe[3][0] = nn.Linear(4, 2)
        pipe[0].weight = nn.Parameter(torch.randn(4, 3))
        torch.testing.assert_close(pipe(input), pipe.module(input))
        assert pipe.get_parameter("3.0.weight") is pipe[3][0].weight


@both_pipes
def test_a_copy_of_a_pipe_has_names_and_layers_of_its_own(plain: bool) -> None:
    with make_pipe(plain) as pipe, copy.deepcopy(pipe) as twin:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            twin(torch.ones(4, 3))
        assert [name for name, _ in twin.named_parameters()] == [name for name, _ in pipe.named_parameters()]
        assert twin.get_submodule("0") is not pipe.get_submodule("0")
