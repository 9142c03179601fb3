"""Autocast, inference mode, hooks, context variables and modes of the caller reach every layer."""

from __future__ import annotations

import contextvars
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gpipe_cli import GPipe
from gpipe_cli.pipeline.gpipe import plain_pipe

pytestmark = pytest.mark.timeout(60)


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        return self.gru(input)[0]


LAYERS = {
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "encoder without dropout": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    "gru": Gru,
    "attention": lambda: SelfAttention(),
    "linear": lambda: nn.Linear(8, 8),
    "layer norm": lambda: nn.LayerNorm(8),
}
EVALUATION = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        return self.attention(input, input, input)[0]


def make_pipe(model: nn.Sequential, plain: bool) -> Any:
    if plain:
        return plain_pipe(model, chunks=2)
    pipe = GPipe(model, [1, 1], chunks=2)
    pipe.step_timeout = 20
    return pipe


both_pipes = pytest.mark.parametrize("plain", [False, True], ids=["GPipe", "plain_pipe"])


@both_pipes
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "float32"])
@pytest.mark.parametrize("mode", EVALUATION)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_first_evaluation_and_every_later_one_give_the_plain_dtype_and_bits(
    layer: str, mode: str, autocast: bool, plain: bool
) -> None:
    """An encoder under autocast gave float32 first and bfloat16 then; a GRU other bits in inference mode."""
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[layer](), nn.Linear(8, 8)).eval()
    input = torch.randn(4, 3, 8)
    casting = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with EVALUATION[mode](), casting:
        expected = torch.cat([model(piece) for piece in input.tensor_split(2)])
    with make_pipe(model, plain) as pipe:
        pipe.eval()
        for _ in range(3):
            with EVALUATION[mode](), casting:
                output = pipe(input)
            assert output.dtype == expected.dtype
            assert output.is_inference() == (mode == "inference")
            assert torch.equal(output, expected)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_layer_in_eval_mode_gives_the_bits_of_training_when_it_is_checkpointed(checkpoint: str) -> None:
    """An encoder without grad goes another way than one with grad, and a checkpointed forward ran without."""
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS["encoder"]().eval(), nn.Linear(8, 8))
    input = torch.randn(4, 3, 8)
    expected = torch.cat([model(piece) for piece in input.tensor_split(2)])
    with GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint) as pipe:
        for _ in range(2):
            assert torch.equal(pipe(input), expected)


@both_pipes
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "float32"])
@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "encoder"])
def test_the_first_step_and_every_later_one_give_the_plain_gradients(
    layer: str, autocast: bool, plain: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[layer](), nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    input, target = torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    for piece, wanted in zip(input.tensor_split(2), target.tensor_split(2), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss = functional.mse_loss(twin(piece), wanted) * 0.5
        loss.backward()
    with make_pipe(model, plain) as pipe:
        for _ in range(3):
            pipe.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                pipe.step(input, target, functional.mse_loss)
            for (name, mine), theirs in zip(pipe.named_parameters(), twin.parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad), name


def test_a_pipe_that_evaluated_in_inference_mode_can_be_trained_afterwards() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    input, target = torch.randn(4, 8), torch.randn(4, 8)
    with GPipe(model, [2, 2], chunks=2, checkpoint="always") as pipe:
        with torch.inference_mode():
            pipe(input)
            pipe.eval()
            pipe(input)
        pipe.train()
        pipe.load_state_dict(twin.state_dict())
        pipe.step(input, target, functional.mse_loss, key=0)
    plain_pipe(twin, chunks=2).step(input, target, functional.mse_loss, key=0)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")


class ReadVariable(nn.Module):
    def __init__(self, values: list[str]) -> None:
        super().__init__()
        self.values = values

    def forward(self, input: Tensor) -> Tensor:
        self.values.append(VARIABLE.get())
        return input * 1


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("call", ["step", "backward"])
def test_a_layer_sees_the_callers_context_variables(checkpoint: str, call: str) -> None:
    """A worker's thread had a context of its own."""
    values: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), ReadVariable(values))
    input = torch.ones(4, 4)
    with GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint) as pipe:
        pipe.step_timeout = 20
        for value in ("first", "second"):
            values.clear()
            token = VARIABLE.set(value)
            try:
                if call == "step":
                    pipe.step(input, input, functional.mse_loss)
                else:
                    pipe(input).sum().backward()
            finally:
                VARIABLE.reset(token)
            assert set(values) == {value}
            assert len(values) == (4 if checkpoint == "always" else 2)


@pytest.mark.parametrize("call", ["step", "backward"])
def test_the_callers_saved_tensor_hooks_see_what_layers_save(call: str) -> None:
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []

    def run(module: Any, input: Tensor) -> None:
        if call == "step" and isinstance(module, GPipe):
            module.step(input, torch.zeros(2, 4), functional.mse_loss)
        else:
            functional.mse_loss(module(input), torch.zeros(2, 4)).backward()

    counts = []
    for build in (lambda model: GPipe(model, [1, 2], chunks=1, checkpoint="never"), lambda model: model):
        packed.clear()
        unpacked.clear()
        module = build(two_layers())
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: packed.append(tensor) or tensor, lambda tensor: unpacked.append(tensor) or tensor
        )
        with hooks:
            run(module, torch.ones(2, 4))
        counts.append((len(packed), len(unpacked)))
        if isinstance(module, GPipe):
            module.close()
    piped, plain = counts
    assert plain[0] > 0
    assert piped[0] >= plain[0]
    assert piped[1] >= plain[1]


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_gradients_are_right_under_saved_tensor_hooks_that_copy(checkpoint: str) -> None:
    model, twin = two_layers(), two_layers()
    input, target = torch.randn(4, 4), torch.randn(4, 4)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.detach().clone().numpy(), torch.from_numpy
    )
    with GPipe(model, [1, 2], chunks=2, checkpoint=checkpoint) as pipe, hooks:
        pipe.step(input, target, functional.mse_loss)
    plain_pipe(twin, chunks=2).step(input, target, functional.mse_loss)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class FunctionNames(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@both_pipes
@pytest.mark.parametrize(("mode", "names"), [(Names, ("addmm", "tanh")), (FunctionNames, ("linear", "tanh"))])
def test_the_callers_mode_sees_every_layer_until_it_is_left(
    mode: type[Names] | type[FunctionNames], names: tuple[str, ...], plain: bool
) -> None:
    with make_pipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), plain) as pipe:
        for _ in range(2):
            with mode() as seen:
                pipe(torch.ones(4, 4))
            assert [sum(name in each for each in seen.names) for name in names] == [2, 2]
            count = len(seen.names)
            pipe(torch.ones(4, 4))
            assert len(seen.names) == count


@pytest.mark.parametrize("call", ["step", "forward"])
def test_flops_of_a_pipe_are_those_of_its_layers(call: str) -> None:
    """The counter of the caller's thread saw nothing that a worker computed."""
    input = torch.ones(4, 4)
    with FlopCounterMode(display=False) as plain:
        output = two_layers()(input)
        if call == "step":
            functional.mse_loss(output, input).backward()
    with GPipe(two_layers(), [1, 2], chunks=2, checkpoint="never") as pipe:
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                pipe.step(input, input, functional.mse_loss) if call == "step" else pipe(input)
            assert counter.get_total_flops() == plain.get_total_flops() > 0
