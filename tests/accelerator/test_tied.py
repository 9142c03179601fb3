"""Layers on different devices that share parameters, buffers or modules: the bits are those of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gpipe_cli import GPipe
from gpipe_cli.pipeline.pipe import Pipe
from tests.accelerator.simulator import Simulator, loaded
from tests.support.command_line import Gpipe

pytestmark = [pytest.mark.accelerator, pytest.mark.timeout(120)]

Devices = list[torch.device]
ROWS = 6


class Scale(nn.Module):
    """Reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.linspace(0.5, 1.5, 4, dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        return input * self.factor


class Around(nn.Module):
    """A layer around a module that another layer holds too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.shared(input).tanh()
        return output


def tied_parameters() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    model[2].weight = model[4].weight = model[0].weight
    return model


def shared_module() -> nn.Sequential:
    shared = nn.Linear(4, 4)
    return nn.Sequential(Around(shared), nn.Tanh(), Around(shared), nn.Linear(4, 4), Around(shared))


def shared_buffer() -> nn.Sequential:
    scale = Scale()
    other = Scale()
    other.factor = scale.factor
    return nn.Sequential(
        nn.Linear(4, 4), Around(scale), nn.Linear(4, 4), other, nn.Sequential(scale, nn.Linear(4, 4))
    )


MODELS = {make.__name__: make for make in (tied_parameters, shared_module, shared_buffer)}


def run_step(pipe: Pipe, key: int) -> None:
    pipe.step(*rows(pipe), mse_loss, key=key)


def run_backward(pipe: Pipe, key: int) -> None:
    torch.manual_seed(key)
    input, target = rows(pipe)
    mse_loss(pipe(input), target).backward()


def run_autograd_grad(pipe: Pipe, key: int) -> None:
    torch.manual_seed(key)
    input, target = rows(pipe)
    parameters = list(pipe.parameters())
    gradients = torch.autograd.grad(mse_loss(pipe(input), target), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


CALLS: list[Callable[[Pipe, int], None]] = [run_step, run_backward, run_autograd_grad]


def rows(pipe: Pipe) -> tuple[Tensor, Tensor]:
    values = torch.linspace(-1, 1, 4 * ROWS, dtype=torch.float64).reshape(ROWS, 4)
    return values.to(pipe.devices[0]), values.square().to(pipe.output_device)


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return MODELS[kind]().double()


def one_device(module: nn.Sequential, devices: Devices) -> GPipe:
    return GPipe(module, [len(module)], devices=devices[:1], chunks=3)


def trained(pipe: Pipe, call: Callable[[Pipe, int], None]) -> list[Tensor]:
    """Gradients of each of three steps, the parameters after them, and outputs before and after a change of one."""
    pipe.step_timeout = 60
    results: list[Tensor] = []
    with pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for key in range(3):
            optimizer.zero_grad()
            call(pipe, key)
            results += [parameter.grad for parameter in pipe.parameters()]
            optimizer.step()
        results += [parameter.detach().clone() for parameter in pipe.parameters()]
        pipe.eval()
        with torch.no_grad():
            results.append(pipe(rows(pipe)[0]))
            # Past autograd's version counter, as some averages of weights are written.
            next(pipe.parameters()).data.mul_(2)
            results.append(pipe(rows(pipe)[0]))
    return [result.cpu() for result in results]


def assert_equal(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert torch.equal(one, other), place


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("call", [*CALLS[:2], pytest.param(CALLS[2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("schedule", "checkpoint"),
    [
        ("gpipe", "except_last"),
        ("1f1b", "always"),
        pytest.param("zero_bubble", "never", marks=pytest.mark.slow),
        pytest.param("interleaved", "always", marks=pytest.mark.slow),
    ],
)
def test_training_gives_the_bits_of_one_device(
    accelerators: Devices,
    kind: str,
    call: Callable[[Pipe, int], None],
    schedule: str,
    checkpoint: str,
    count: int,
) -> None:
    """Parameters on several devices were refused, and a shared buffer was left where its last layer was."""
    devices = (accelerators * 4)[:count]
    balance = [1, 1, 1, 2] if count == 4 or schedule == "interleaved" else [2, 3]
    pipe = GPipe(model(kind), balance, devices=devices, chunks=3, schedule=schedule, checkpoint=checkpoint)
    assert_equal(trained(pipe, call), trained(one_device(model(kind), accelerators), call))


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", MODELS)
def test_kernels_that_run_late_and_in_any_order_give_the_same_bits(
    simulated: Simulator, kind: str, call: Callable[[Pipe, int], None]
) -> None:
    expected = trained(one_device(model(kind), simulated.devices), call)
    for seed in range(3):
        with simulated.asynchronous(seed):
            pipe = GPipe(model(kind), [1, 1, 1, 2], devices=simulated.devices, chunks=3)
            assert_equal(trained(pipe, call), expected)


@pytest.mark.parametrize("call", CALLS[:2])
def test_a_hook_sees_the_gradients_that_it_sees_on_one_device(
    accelerators: Devices, call: Callable[[Pipe, int], None]
) -> None:
    """One per micro-batch of a step, of all uses together."""

    def gradients(pipe: Pipe) -> list[Tensor]:
        seen: list[Tensor] = []
        weight = next(pipe.parameters())
        weight.register_hook(lambda gradient: seen.append(gradient.cpu()) or gradient.clamp(-0.01, 0.01))
        with pipe:
            call(pipe, 0)
        assert weight.grad is not None
        return [*seen, weight.grad.cpu()]

    pipe = GPipe(model("tied_parameters"), [1, 1, 1, 2], devices=(accelerators * 4)[:4], chunks=3)
    assert_equal(gradients(pipe), gradients(one_device(model("tied_parameters"), accelerators)))


def test_a_shared_parameter_stays_one_parameter_on_the_device_of_its_first_layer(
    accelerators: Devices,
) -> None:
    module = model("tied_parameters")
    devices = (accelerators * 2)[:2]
    with GPipe(module, [2, 3], devices=devices, chunks=3) as pipe:
        run_step(pipe, 0)
        assert module[4].weight is module[2].weight is module[0].weight
        assert module[0].weight.device == module[0].weight.grad.device == devices[0]
        assert len(list(pipe.parameters())) == 4
        state = {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}
        other = GPipe(model("tied_parameters"), [1, 4], devices=devices, chunks=3)
        other.load_state_dict(state)
        assert other.module[4].weight is other.module[0].weight
        assert torch.equal(other.module[4].weight, module[4].weight)


def test_a_tie_that_is_made_after_construction_crosses_devices_too(accelerators: Devices) -> None:
    """Its parameter is on the device of its last layer then."""

    def tied_anew(pipe: Pipe) -> list[Tensor]:
        pipe.module[0].weight = pipe.module[2].weight
        return trained(pipe, run_step)

    pipe = GPipe(model("shared_buffer"), [2, 3], devices=(accelerators * 2)[:2], chunks=3)
    assert_equal(tied_anew(pipe), tied_anew(one_device(model("shared_buffer"), accelerators)))


class Count(nn.Module):
    """Writes a buffer in place, or replaces it."""

    def __init__(self, count: Tensor, how: str) -> None:
        super().__init__()
        self.register_buffer("count", count)
        self.how = how

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.how == "write":
            self.count.add_(1)
        elif self.training and self.how == "replace":
            self.count = self.count + 1
        return input + self.count


@pytest.mark.parametrize(("first", "last"), [("write", "read"), ("read", "write"), ("read", "replace")])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_no_layer_may_write_a_buffer_that_layers_on_two_devices_share(
    accelerators: Devices, checkpoint: str, first: str, last: str
) -> None:
    if len(accelerators) < 2:
        pytest.skip("needs two accelerators")
    count = torch.zeros(4, dtype=torch.float64)
    module = nn.Sequential(Count(count, first), nn.Linear(4, 4), Count(count, last)).double()
    with GPipe(module, [1, 2], devices=accelerators[:2], chunks=2, checkpoint=checkpoint) as pipe:
        with pytest.raises(RuntimeError, match=r"layers on another device \('count' of a Count\)"):
            run_step(pipe, 0)
        if (simulated := loaded()) is not None:
            simulated.reset()  # the write that is refused races with the copy
        pipe.eval()
        run_step(pipe, 0)


def test_a_step_with_tied_parameters_does_not_wait_for_any_device(simulated: Simulator) -> None:
    for kind in MODELS:
        pipe = GPipe(model(kind), [1, 1, 1, 2], devices=simulated.devices, chunks=3)
        with pipe:
            batch = rows(pipe)
            pipe.step(*batch, mse_loss, key=0)  # looks at the layers for the first time
            simulated.reset()
            pipe.step(*batch, mse_loss, key=1)
            assert simulated.host_syncs() == []


@pytest.mark.slow
def test_gpt_trains_on_two_devices_and_resumes_with_the_bits_of_one(
    accelerators: Devices, gpipe: Gpipe
) -> None:
    """`gpipe train model=gpt` failed on two devices: its embedding and its head share a matrix."""
    words = ["model=gpt", "model.depth=2", "model.width=16", "model.dropout=0.1", "data=text", "batch_size=8"]
    common = ["train", *words, "chunks=4", "threads=1", "snapshot.every=1"]
    assert gpipe(*common, "steps=2", "engine=single", "devices=1", "run_dir=one").code == 0
    assert gpipe(*common, "steps=1", f"devices={min(2, len(accelerators))}", "run_dir=two").code == 0
    assert gpipe("train", "resume=two", "steps=2").code == 0
    expected, mine = snapshot("one"), snapshot("two")
    assert "embedding.tokens.weight/exp_avg" in expected
    assert not any(name.startswith("head.scores.weight/") for name in mine)
    assert mine.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(mine[name], tensor)] == []


def snapshot(run: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in ("model", "optimizer"):
        with safe_open(f"{run}/snapshots/step-00000002/{name}.safetensors", "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    return tensors
