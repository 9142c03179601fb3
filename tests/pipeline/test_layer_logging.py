"""The log lines of partitions and layers."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpipe_cli import GPipe, register_layer_logging_hooks
from gpipe_cli.pipeline import layer_logging
from tests.accelerator.simulator import Simulator


def pipe_of_five(**options: object) -> GPipe:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
    return GPipe(nn.Sequential(*layers), balance=[2, 3], **options)


def test_each_micro_batch_at_each_partition_is_one_info_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gpipe_cli")
    with pipe_of_five(chunks=3) as pipe:
        pipe(torch.ones(3, 4))
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert all(record.name.startswith("gpipe_cli") for record in caplog.records)
    assert sorted(caplog.messages) == [
        "Micro-batch 0 (partition 0): checkpoint_stop=2, using_checkpointing=True",
        "Micro-batch 0 (partition 1): checkpoint_stop=2, using_checkpointing=True",
        "Micro-batch 1 (partition 0): checkpoint_stop=2, using_checkpointing=True",
        "Micro-batch 1 (partition 1): checkpoint_stop=2, using_checkpointing=True",
        "Micro-batch 2 (partition 0): checkpoint_stop=2, using_checkpointing=False",
        "Micro-batch 2 (partition 1): checkpoint_stop=2, using_checkpointing=False",
    ]


def test_each_layer_is_one_debug_line_with_micro_batch_and_recomputation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="gpipe_cli")
    with pipe_of_five(chunks=2) as pipe:
        hooks = register_layer_logging_hooks(pipe.partitions)
        pipe(torch.ones(2, 4)).sum().backward()
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
        assert [line for line in lines if "partition 1" in line] == [
            "Executing layer '2' in partition 1: Linear [micro-batch 0]",
            "Executing layer '3' in partition 1: ReLU [micro-batch 0]",
            "Executing layer '4' in partition 1: Linear [micro-batch 0]",
            "Executing layer '2' in partition 1: Linear [micro-batch 1]",
            "Executing layer '3' in partition 1: ReLU [micro-batch 1]",
            "Executing layer '4' in partition 1: Linear [micro-batch 1]",
            "Executing layer '2' in partition 1: Linear [micro-batch 0, recompute]",
            "Executing layer '3' in partition 1: ReLU [micro-batch 0, recompute]",
            "Executing layer '4' in partition 1: Linear [micro-batch 0, recompute]",
        ]
        for hook in hooks:
            hook.remove()
        caplog.clear()
        pipe(torch.ones(2, 4))
        assert not any(record.levelno == logging.DEBUG for record in caplog.records)


def test_the_line_comes_before_the_layer_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="gpipe_cli")

    class Failing(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise ValueError("too late to log now")

    with GPipe(nn.Sequential(Failing()), [1]) as pipe:
        register_layer_logging_hooks(pipe.partitions)
        with pytest.raises(ValueError, match="too late"):
            pipe(torch.ones(1, 1))
    assert "Executing layer '0' in partition 0: Failing [micro-batch 0]" in caplog.messages


def test_outside_a_pipe_a_layer_has_no_micro_batch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="gpipe_cli")
    pipe = pipe_of_five()
    register_layer_logging_hooks(pipe.partitions)
    pipe[4](torch.ones(1, 4))
    assert caplog.messages == ["Executing layer '4' in partition 1: Linear"]


def test_loggers_are_off_and_unconfigured_by_default() -> None:
    assert logging.getLogger("gpipe_cli").handlers == []
    assert not logging.getLogger("gpipe_cli.pipeline").isEnabledFor(logging.INFO)


TIMED = re.compile(
    r"(?P<phase>[a-z ]+) \| micro-batch (?P<micro_batch>\d) \| partition (?P<partition>\d) \| "
    r"layer (?P<layer>\S+) \| (?P<kind>\w+) \| \d+\.\d{3} ms"
)


def timed_lines(caplog: pytest.LogCaptureFixture) -> Counter[tuple[str, int, int, str, str]]:
    """What ran, as often as it did, from the lines of `log_layers`."""
    lines = [
        TIMED.fullmatch(record.getMessage()) for record in caplog.records if record.levelno == logging.DEBUG
    ]
    assert all(lines)
    return Counter(
        (line["phase"], int(line["micro_batch"]), int(line["partition"]), line["layer"], line["kind"])
        for line in lines
        if line is not None
    )


def step_of(pipe: GPipe) -> list[torch.Tensor | None]:
    """Run a training step; the gradient of each parameter."""
    pipe.zero_grad()
    pipe.step(
        torch.linspace(-1, 1, 12).view(3, 4), torch.zeros(3, dtype=torch.long), nn.functional.cross_entropy
    )
    return [parameter.grad for parameter in pipe.parameters()]


@pytest.mark.parametrize(
    ("schedule", "halves"), [("1f1b", ["backward"]), ("zero_bubble", ["backward input", "backward weights"])]
)
def test_a_step_logs_every_layer_of_every_phase_once_with_its_time(
    schedule: str, halves: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="gpipe_cli.layers")
    with pipe_of_five(chunks=3, schedule=schedule) as pipe:
        pipe.log_layers()
        step_of(pipe)
    kinds = ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    layers = [(place // 2 if place < 2 else 1, str(place), kind) for place, kind in enumerate(kinds)]
    expected = [("forward", micro_batch, *layer) for micro_batch in range(3) for layer in layers]
    expected += [("recompute", micro_batch, *layer) for micro_batch in range(2) for layer in layers]
    backward = [("backward", micro_batch, *layer) for micro_batch in range(3) for layer in layers]
    logged = timed_lines(caplog)
    assert {line: count for line, count in logged.items() if "backward" not in line[0]} == Counter(expected)
    assert {line[0] for line in logged if "backward" in line[0]} >= set(halves)
    assert {("backward", *line[1:]) for line in logged if "backward" in line[0]} == set(backward)
    assert set(logged.values()) == {1}


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_timing_the_layers_changes_no_gradient(schedule: str) -> None:
    gradients = []
    for logs in (False, True):
        with pipe_of_five(chunks=2, schedule=schedule) as pipe:
            if logs:
                pipe.log_layers()
            gradients.append(step_of(pipe))
    for plain, timed in zip(*gradients, strict=True):
        assert plain is not None and timed is not None and torch.equal(plain, timed)


def test_layers_below_the_first_trained_one_have_no_backward_to_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="gpipe_cli.layers")
    with pipe_of_five(chunks=1) as pipe:
        pipe[0].requires_grad_(False)
        pipe[2].requires_grad_(False)
        pipe.log_layers()
        step_of(pipe)
    assert [line[3] for line in timed_lines(caplog) if line[0] == "backward"] == ["4"]


def test_an_evaluation_logs_forwards_only_and_a_layer_called_alone_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="gpipe_cli.layers")
    with pipe_of_five(chunks=1) as pipe, torch.no_grad():
        pipe.log_layers()
        pipe.eval()(torch.ones(1, 4))
        assert [line[0] for line in timed_lines(caplog)] == ["forward"] * 5
        caplog.clear()
        pipe[4](torch.ones(1, 4))
    assert caplog.messages == []


def test_an_error_in_backward_still_names_its_layer_and_leaves_no_hook(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, input: torch.Tensor) -> torch.Tensor:
            return input.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("in backward")

    class Failing(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = Fails.apply(input)
            return output

    caplog.set_level(logging.DEBUG, logger="gpipe_cli.layers")
    with GPipe(nn.Sequential(nn.Linear(4, 4), Failing(), nn.Linear(4, 2)), [3]) as pipe:
        pipe.log_layers()
        with pytest.raises(ZeroDivisionError, match="in backward") as raised:
            step_of(pipe)
    assert "layer '1' (Failing)" in raised.value.__notes__[0]
    assert {line[0] for line in timed_lines(caplog)} == {"forward"}


@pytest.mark.accelerator
def test_a_time_on_an_accelerator_is_that_of_the_device(
    simulated: Simulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="gpipe_cli.layers")
    idle: list[bool] = []

    def perf_counter() -> float:
        idle.append(simulated.is_idle())
        return time.perf_counter()

    monkeypatch.setattr(layer_logging, "time", SimpleNamespace(perf_counter=perf_counter))
    device = simulated.devices[0]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with simulated.asynchronous(), GPipe(model, [3], devices=[device], chunks=2) as pipe:
        pipe.log_layers()
        input, target = torch.ones(4, 4, device=device), torch.zeros(4, dtype=torch.long, device=device)
        pipe.step(input, target, nn.functional.cross_entropy)
    assert {line[0] for line in timed_lines(caplog)} == {"forward", "recompute", "backward"}
    assert len(idle) > 20 and all(idle)
