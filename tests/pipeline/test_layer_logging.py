"""The log lines of partitions and layers."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from gpipe_cli import GPipe, register_layer_logging_hooks


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
