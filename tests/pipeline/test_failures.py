"""The first failure reaches the caller unchanged, says where it happened, and nothing hangs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import signal
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe, current_microbatch, is_recomputing
from gpipe_cli.errors import StepTimeout
from gpipe_cli.pipeline.action_loop import ActionLoop
from gpipe_cli.pipeline.failures import add_note


class Ouch(Exception):
    pass


class Fatal(BaseException):
    pass


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, input: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return input.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ctx.error


class Trap(nn.Module):
    """Raises once for one micro-batch in one phase, if it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.micro_batch = -1
        self.phase = ""
        self.error: BaseException = Ouch("it hurts")

    def forward(self, input: Tensor) -> Tensor:
        here = current_microbatch()
        phase = "recompute" if is_recomputing() else "forward"
        output = self.linear(input)
        if here.index != self.micro_batch:
            return output
        if phase == self.phase:
            raise self.error
        return RaiseInBackward.apply(output, self.error) if self.phase == "backward" else output


def set_trap(pipe: GPipe, layer: int, micro_batch: int, phase: str, error: BaseException) -> None:
    trap = pipe[layer]
    trap.micro_batch, trap.phase, trap.error = micro_batch, phase, error


CASES = list(itertools.product(range(3), range(3), ["forward", "recompute", "backward"], [Ouch, Fatal]))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_any_error_anywhere_reaches_the_caller_with_its_place_and_the_next_step_works(schedule: str) -> None:
    input, target = torch.randn(6, 2), torch.randn(6, 2)
    with GPipe(nn.Sequential(*(Trap() for _ in range(3))), [1] * 3, chunks=3, schedule=schedule) as pipe:
        pipe.checkpoint = "always"
        pipe.step_timeout = 60
        good = pipe.step(input, target, functional.mse_loss)
        for layer, micro_batch, phase, kind in CASES:
            error = kind("it hurts")
            set_trap(pipe, layer, micro_batch, phase, error)
            with pytest.raises(kind, match="it hurts") as caught:
                pipe.step(input, target, functional.mse_loss)
            assert caught.value is error
            letter = "F" if phase == "forward" else "[IW]" if schedule == "zero_bubble" else "B"
            (note,) = error.__notes__
            assert f"partition {layer}, layer '{layer}' (Trap), micro-batch {micro_batch}" in note
            assert re.search(rf"action {letter}{layer}\.{micro_batch} \({phase}\)", note)
            set_trap(pipe, layer, -1, "", error)
            assert torch.equal(pipe.step(input, target, functional.mse_loss), good)


def test_an_error_in_loss_backward_reaches_the_caller_and_the_next_step_works() -> None:
    with GPipe(nn.Sequential(Trap(), Trap()), [1, 1], chunks=2) as pipe:
        set_trap(pipe, 0, 1, "backward", Fatal("late"))
        loss = pipe(torch.ones(4, 2)).sum()
        with pytest.raises(Fatal, match="late"):
            loss.backward()
        set_trap(pipe, 0, -1, "", Fatal("never"))
        pipe(torch.ones(4, 2)).sum().backward()


class Exponential(nn.Module):
    """Its backward needs its output as it was."""

    def forward(self, input: Tensor) -> Tensor:
        return input.exp()


class AddInPlace(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input.add_(1)


class Hooked(nn.Module):
    """A hook that raises: no node of the graph is in the traceback then."""

    def forward(self, input: Tensor) -> Tensor:
        output = input.sigmoid()
        output.register_hook(self.hook)
        return output

    def hook(self, gradient: Tensor) -> None:
        raise Ouch("hooked")


def note_of_a_failing_step(layers: list[nn.Module], error: type[BaseException], message: str) -> str:
    pipe = GPipe(nn.Sequential(*layers), [len(layers) - 1, 1], chunks=2, checkpoint="never")
    with pipe, pytest.raises(error, match=message) as caught:
        pipe.step(torch.ones(4, 2), torch.ones(4, 2), functional.mse_loss)
    (note,) = caught.value.__notes__
    return note


@pytest.mark.parametrize("place", range(4))
def test_the_layer_whose_backward_raises_is_named_among_others(place: int) -> None:
    layers: list[nn.Module] = [nn.Linear(2, 2), nn.Sigmoid(), nn.Identity(), nn.Linear(2, 2), nn.Linear(2, 2)]
    trap = Trap()
    trap.micro_batch, trap.phase = 0, "backward"
    layers[place] = trap
    note = note_of_a_failing_step(layers, Ouch, "it hurts")
    assert f"in partition 0, layer '{place}' (Trap), micro-batch 0, action B0.0 (backward)" in note


def test_the_layer_whose_output_was_overwritten_is_named() -> None:
    layers = [nn.Linear(2, 2), Exponential(), AddInPlace(), nn.Linear(2, 2), nn.Linear(2, 2)]
    note = note_of_a_failing_step(layers, RuntimeError, "modified by an inplace operation")
    assert "partition 0, layer '1' (Exponential), micro-batch 0" in note


def test_a_hook_that_raises_is_in_the_layers_between_what_has_run_and_what_has_not() -> None:
    layers = [nn.Linear(2, 2), nn.Tanh(), Hooked(), nn.Linear(2, 2), nn.Linear(2, 2)]
    note = note_of_a_failing_step(layers, Ouch, "hooked")
    # The transposition of the weight saves nothing, so whether it had run cannot be told.
    assert "layers '2' (Hooked) to '3' (Linear), micro-batch 0" in note


def test_an_error_in_the_backward_of_the_loss_function_says_so() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return RaiseInBackward.apply(functional.mse_loss(output, target), Ouch("no way back"))

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    with pipe, pytest.raises(Ouch, match="no way back") as caught:
        pipe.step(torch.ones(4, 2), torch.ones(4, 2), loss_fn)
    assert "partition 1, the loss function, micro-batch 0" in caught.value.__notes__[0]


def test_an_error_of_the_loss_function_says_so() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        raise Ouch("no loss today")

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    with pipe, pytest.raises(Ouch, match="no loss today") as caught:
        pipe.step(torch.ones(4, 2), torch.ones(4), loss_fn)
    assert "partition 1, the loss function, micro-batch 0" in caught.value.__notes__[0]


def test_no_action_begins_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchgpipe's early stop: the first partition stops once the second has failed."""
    failed = threading.Event()
    begun: list[int] = []
    fail = ActionLoop.fail

    def fail_and_tell(self: ActionLoop, error: BaseException) -> None:
        fail(self, error)
        failed.set()

    monkeypatch.setattr(ActionLoop, "fail", fail_and_tell)

    class Count(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            begun.append(current_microbatch().index)
            if begun[-1] == 1:
                failed.wait(30)
            return input

    class Fail(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            raise Ouch

    with GPipe(nn.Sequential(Count(), Fail()), [1, 1], chunks=8) as pipe, pytest.raises(Ouch):
        pipe(torch.ones(8, 1))
    assert begun == [0, 1]


def test_the_first_failure_wins() -> None:
    first = threading.Event()

    class Early(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            if current_microbatch().index == 1:
                first.set()
                raise Ouch("first")
            return input

    class Late(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            first.wait(30)
            return input

    with GPipe(nn.Sequential(Early(), Late()), [1, 1], chunks=2) as pipe, pytest.raises(Ouch, match="first"):
        pipe(torch.ones(2, 1))


def test_after_a_failure_neither_threads_nor_tensors_are_left() -> None:
    class Leak(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            output = input * 2
            references.append(weakref.ref(output))
            if current_microbatch().index == 1:
                raise Ouch
            return output

    references: list[weakref.ref[Tensor]] = []
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Leak()), [1, 1], chunks=2)
    threads = threading.active_count()
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            with contextlib.suppress(Ouch):
                pipe.step(torch.ones(2, 2), torch.ones(2, 2), functional.mse_loss)
        # The worker may still be on its way out of the last job: another call waits for it.
        pipe.eval()
        with pytest.raises(Ouch):
            pipe(torch.ones(2, 2))
    finally:
        gc.enable()
    assert threading.active_count() == threads + 2
    assert all(reference() is None for reference in references[:-4])
    pipe.close()
    assert threading.active_count() == threads


def test_ctrl_c_while_the_caller_waits_ends_the_step_once_the_running_actions_have_ended() -> None:
    begun: list[int] = []

    class Interrupt(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            begun.append(current_microbatch().index)
            if interrupts:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                stopped.wait(30)
            return input

    stopped = threading.Event()
    interrupts = True
    with GPipe(nn.Sequential(Interrupt(), nn.Identity()), [1, 1], chunks=4) as pipe:
        fail = ActionLoop.fail

        def fail_and_tell(walk: ActionLoop, error: BaseException) -> None:
            fail(walk, error)
            stopped.set()

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ActionLoop, "fail", fail_and_tell)
            pipe(torch.ones(4, 1))
        assert begun == [0]
        interrupts = False
        assert torch.equal(pipe(torch.ones(4, 1)), torch.ones(4, 1))


def test_a_partition_that_never_returns_trips_the_watchdog(capfd: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()

    class Stuck(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            release.wait(60)
            return input

    pipe = GPipe(nn.Sequential(nn.Identity(), Stuck()), [1, 1], chunks=2)
    pipe.step_timeout = 2
    with pytest.raises(StepTimeout, match=r"1 of 2 workers did not end within step_timeout=2 seconds"):
        pipe(torch.ones(2, 1))
    stacks = capfd.readouterr().err
    assert "Thread gpipe-worker-1" in stacks
    assert "release.wait(60)" in stacks
    release.set()
    pipe.step_timeout = 60
    assert torch.equal(pipe(torch.ones(2, 1)), torch.ones(2, 1)), "the pipe is usable again"
    pipe.close()


def test_a_description_that_raises_leaves_the_error_without_a_note() -> None:
    error = Ouch()

    def describe() -> str:
        raise Fatal

    add_note(error, describe)
    assert not hasattr(error, "__notes__")
    add_note(error, lambda: "in partition 0")
    assert error.__notes__ == ["in partition 0"]
