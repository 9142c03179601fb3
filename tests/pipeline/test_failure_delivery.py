"""A failure always reaches the caller, whatever the search for its place does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.pipeline.pipe import Pipe

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]
CALLS = ["step", "backward"]
# Whatever helps to say where a failure happened: "module:name" or "module:class.method".
DIAGNOSIS = [
    "gpipe_cli.pipeline.failures:_suspects",
    "gpipe_cli.pipeline.failures:_in_traceback",
    "gpipe_cli.pipeline.failures:_with_the_same_message",
    "gpipe_cli.pipeline.failures:_created_by_layers",
    "gpipe_cli.pipeline.failures:_between",
    "gpipe_cli.pipeline.failures:saved_tensor_error",
    "gpipe_cli.pipeline.failures:has_run",
    "gpipe_cli.pipeline.failures:number_of",
    "gpipe_cli.pipeline.layer_loop:layer_that_failed",
    "gpipe_cli.pipeline.layer_loop:LayerLoop.locate",
    "gpipe_cli.pipeline.partition:Partition.locate",
    "gpipe_cli.pipeline.action_loop:failure_note",
    "gpipe_cli.pipeline.layer:Layer.__repr__",
]

HANGS = 20
"""Seconds after which a call that has not ended counts as hanging."""

pytestmark = pytest.mark.timeout(60)


class Ouch(Exception):
    pass


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return input * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (_,) = ctx.saved_tensors
        return gradient * 2


class NotSaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Materialized(torch.autograd.Function):
    """Saves an input, an output, something that is no tensor, and nothing at a place."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        output = input * 2
        ctx.note = "a note"
        ctx.save_for_backward(input, None, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 3
        return gradient * 2


class Applied(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        return self.function.apply(input)


class CannotBeNoted(Exception):
    def add_note(self, note: str) -> None:
        raise RuntimeError("no notes, please")


class CannotBeExplained(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words, please")

    __repr__ = __str__


class Fatal(BaseException):
    pass


class FatalToTheDiagnosis(Exception):
    def add_note(self, note: str) -> None:
        raise Fatal

    def __str__(self) -> str:
        raise Fatal

    __repr__ = __str__


class Slotted(Exception):
    """Its notes are no list."""

    __notes__ = ()


def run(pipe: Pipe, call: str) -> None:
    input, target = torch.arange(8.0).reshape(4, 2) / 8, torch.ones(4, 2)
    if call == "step":
        pipe.step(input, target, functional.mse_loss, key=0)
    else:
        functional.mse_loss(pipe(input), target).backward()


def gradients(pipe: Pipe) -> list[Tensor]:
    return [leaf.grad.clone() for leaf in pipe.parameters() if leaf.grad is not None]


def check_failure(
    layers: list[nn.Module],
    arm: Callable[[nn.Sequential], Callable[[], None]],
    call: str,
    error: type[Exception] = Ouch,
    **options: Any,
) -> None:
    """The armed pipe raises the error, twice; disarmed it gives the gradients it gave before."""
    options = {"balance": [len(layers) - 1, 1], "chunks": 2, "checkpoint": "never", **options}
    with GPipe(nn.Sequential(*layers), step_timeout=HANGS, **options) as pipe:
        run(pipe, call)
        good = gradients(pipe)
        pipe.zero_grad()
        disarm = arm(pipe.module)
        for _ in range(2):
            with pytest.raises(error) as caught:
                run(pipe, call)
            assert caught.type is error
        disarm()
        pipe.zero_grad()
        run(pipe, call)
        for mine, theirs in zip(gradients(pipe), good, strict=True):
            assert torch.equal(mine, theirs)


def raising(error: type[Exception]) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        raise error("the hook's")

    return hook


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("function", [Saving, NotSaving, Materialized], ids=lambda each: each.__name__)
def test_a_parameters_hook_that_raises_beside_a_custom_function_does_not_hang(
    function: type[torch.autograd.Function], call: str
) -> None:
    """The search asked the Function for saved tensors by a name that only torch's own nodes have."""

    def arm(model: nn.Sequential) -> Callable[[], None]:
        return model[0].weight.register_hook(raising(Ouch)).remove

    check_failure([nn.Linear(2, 2), Applied(function), nn.Linear(2, 2)], arm, call)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_no_schedule_hangs_when_a_hook_raises_beside_a_custom_function(
    schedule: str, checkpoint: str
) -> None:
    def arm(model: nn.Sequential) -> Callable[[], None]:
        return model[1].weight.register_hook(raising(Ouch)).remove

    layers = [nn.Linear(2, 2), nn.Linear(2, 2), Applied(Saving), nn.Linear(2, 2)]
    check_failure(
        layers, arm, "step", balance=[1, 2, 1], schedule=schedule, checkpoint=checkpoint, devices=["cpu"] * 3
    )


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error", [CannotBeNoted, CannotBeExplained, FatalToTheDiagnosis, Slotted], ids=lambda each: each.__name__
)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_exception_that_cannot_be_noted_or_shown_still_arrives(
    error: type[Exception], call: str, phase: str
) -> None:
    """One whose add_note raised killed the worker, and the caller waited for ever."""

    def arm(model: nn.Sequential) -> Callable[[], None]:
        if phase == "backward":
            return model[0].weight.register_hook(raising(error)).remove
        return model[0].register_forward_pre_hook(lambda module, input: raising(error)(input[0])).remove

    check_failure([nn.Linear(2, 2), Applied(Saving), nn.Linear(2, 2)], arm, call, error)


@pytest.mark.parametrize("helper", DIAGNOSIS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("fault", [RuntimeError, Fatal])
def test_no_part_of_the_diagnosis_can_replace_the_failure(
    helper: str, phase: str, fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the search for the failed layer left the caller waiting, without either error."""

    def fail(*args: object, **kwargs: object) -> object:
        raise fault("the diagnosis itself failed")

    place, _, name = helper.partition(":")
    owner: Any = importlib.import_module(place)
    *classes, name = name.split(".")
    for each in classes:
        owner = getattr(owner, each)

    def arm(model: nn.Sequential) -> Callable[[], None]:
        monkeypatch.setattr(owner, name, fail)
        if phase == "backward":
            return model[0].weight.register_hook(raising(Ouch)).remove
        return model[0].register_forward_pre_hook(lambda module, input: raising(Ouch)(input[0])).remove

    check_failure([nn.Linear(2, 2), nn.Tanh(), Applied(NotSaving), nn.Linear(2, 2)], arm, "step")


def test_every_helper_of_the_diagnosis_is_listed() -> None:
    """A name that changed would make the test above patch nothing."""
    for helper in DIAGNOSIS:
        place, _, name = helper.partition(":")
        owner: Any = importlib.import_module(place)
        for each in name.split("."):
            owner = getattr(owner, each)
        assert callable(owner)


@pytest.mark.parametrize("call", CALLS)
def test_the_failures_type_and_identity_survive_a_module_backward_hook(call: str) -> None:
    error = Ouch("in a module's hook")

    def hook(module: nn.Module, entered: object, left: object) -> None:
        raise error

    model = nn.Sequential(nn.Linear(2, 2), Applied(Saving), nn.Linear(2, 2))
    with GPipe(model, [2, 1], chunks=2, checkpoint="never") as pipe:
        pipe.step_timeout = 20
        handle = model[1].register_full_backward_hook(hook)
        with pytest.raises(Ouch) as caught:
            run(pipe, call)
        assert caught.value is error
        handle.remove()
        run(pipe, call)


def test_a_hook_that_raises_beside_a_custom_function_still_says_where() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Applied(Saving), nn.Linear(2, 2))
    model[0].weight.register_hook(raising(Ouch))
    with GPipe(model, [2, 1], chunks=2, checkpoint="never") as pipe:
        pipe.step_timeout = 20
        with pytest.raises(Ouch) as caught:
            run(pipe, "step")
    (note,) = caught.value.__notes__
    assert "in partition 0" in note
    assert "micro-batch 0" in note


def test_a_device_that_refuses_to_wait_after_a_failure_does_not_replace_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an error of a kernel, every later call to the device raises."""

    class Broken(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            raise Ouch

    def refuse(devices: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("gpipe_cli.pipeline.executor.wait_for_copies", refuse)
    with (
        GPipe(nn.Sequential(nn.Linear(2, 2), Broken()), [1, 1], devices=["cpu", "cpu"]) as pipe,
        pytest.raises(Ouch) as caught,
    ):
        pipe.step(torch.ones(2, 2), torch.ones(2, 2), functional.mse_loss)
    assert "in partition 1" in caught.value.__notes__[0]
