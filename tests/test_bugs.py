"""Stories: what went wrong in the systems before this one, or would have here."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe_cli import GPipe, current_microbatch, register_layer_logging_hooks
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.schedule.action import Checkpoint
from gpipe_cli.torch_internals.keyed_random import UnkeyedRandomError


def test_a_keyboard_interrupt_in_a_layer_does_not_hang_the_caller() -> None:
    """torchgpipe's worker caught Exception only and died; the caller waited for ever."""

    class Interrupted(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            raise KeyboardInterrupt

    with GPipe(nn.Sequential(nn.Identity(), Interrupted()), [1, 1], chunks=2) as pipe:
        pipe.step_timeout = 60
        with pytest.raises(KeyboardInterrupt):
            pipe(torch.ones(2, 1))


def test_backward_is_parallel_on_cpu_where_autograd_would_run_it_in_the_caller() -> None:
    """torchgpipe#29, #5: 'cannot boost model performance without GPUs'. Two partitions meet in their
    backward.
    """
    meeting = threading.Barrier(2, timeout=60)

    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, input: Tensor, waits: bool) -> Tensor:
            ctx.waits = waits
            return input.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
            if ctx.waits:
                meeting.wait()
            return gradient, None

    class Layer(nn.Module):
        def __init__(self, micro_batch: int) -> None:
            super().__init__()
            self.micro_batch = micro_batch

        def forward(self, input: Tensor) -> Tensor:
            return Meet.apply(input, current_microbatch().index == self.micro_batch)

    # While the first partition is at micro-batch 0, the second is at micro-batch 1.
    with GPipe(nn.Sequential(Layer(0), Layer(1)), [1, 1], chunks=2, checkpoint="never") as pipe:
        pipe(torch.ones(2, 1, requires_grad=True)).sum().backward()


def test_forward_is_parallel_on_one_cpu_device_given_twice() -> None:
    """torchgpipe kept one worker per distinct device, and 'cpu' is one device."""
    meeting = threading.Barrier(2, timeout=60)

    class Meet(nn.Module):
        def __init__(self, micro_batch: int) -> None:
            super().__init__()
            self.micro_batch = micro_batch

        def forward(self, input: Tensor) -> Tensor:
            if current_microbatch().index == self.micro_batch:
                meeting.wait()
            return input

    with GPipe(nn.Sequential(Meet(1), Meet(0)), [1, 1], devices=["cpu", "cpu"], chunks=2) as pipe:
        pipe(torch.ones(2, 1))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_dropout_under_checkpointing_in_several_threads_keeps_its_masks(checkpoint: str) -> None:
    """Saving and restoring the process's generator from worker threads gave 473 of 1000 gradients wrong."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(4)]
    model = nn.Sequential(*layers)
    plain = plain_pipe(copy.deepcopy(model), chunks=4)
    input, target = torch.randn(8, 16), torch.randn(8, 16)
    with GPipe(model, [1, 1, 1, 1], chunks=4, checkpoint=checkpoint) as pipe:
        for key in range(5):
            for each in (pipe, plain):
                each.step(input, target, functional.mse_loss, key=key)
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize(("balance", "schedule"), [([4], "gpipe"), ([1, 3], "gpipe"), ([2, 2], "1f1b")])
def test_the_same_seed_gives_the_same_masks_whatever_the_partitions(
    balance: list[int], schedule: str
) -> None:
    """torchgpipe#35, pytorch#55036: results changed with the partitions at a fixed seed."""
    model = nn.Sequential(*(nn.Dropout(0.5) for _ in range(4)))
    outputs = []
    for cut, order in (([1, 1, 1, 1], "gpipe"), (balance, schedule)):
        torch.manual_seed(7)
        with GPipe(model, cut, chunks=3, schedule=order) as pipe:
            outputs.append(pipe(torch.ones(9, 9)))
    assert torch.equal(*outputs)


class OwnCheckpoint(nn.Module):
    """Draws before, inside, between and after checkpoints of its own."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8), nn.Dropout(0.3)) for _ in "ab"
        )
        self.run = run

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.run(self.first, nn.functional.dropout(input, 0.1))
        return nn.functional.dropout(self.run(self.second, nn.functional.dropout(hidden, 0.2)), 0.4)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_checkpoints_inside_a_layer_draw_the_numbers_of_a_layer_without(
    reentrant: bool, mode: Checkpoint, schedule: str
) -> None:
    """torch.utils.checkpoint restores the default generator, which the forward did not draw from: it was refused."""

    def trained(run: Callable[..., Tensor], balance: list[int], mode: Checkpoint) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), OwnCheckpoint(run), OwnCheckpoint(run))
        with GPipe(model, balance, chunks=3, schedule=schedule, checkpoint=mode) as pipe:
            pipe.step(torch.ones(6, 8), torch.zeros(6, 8), nn.functional.mse_loss, key=1)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain = trained(lambda function, input: function(input), [3], "never")
    repeated = trained(partial(torch_checkpoint, use_reentrant=reentrant), [2, 1], mode)
    assert len(plain) == 10 and all(map(torch.equal, plain, repeated))


def test_a_checkpoint_inside_a_layer_that_would_draw_other_numbers_is_refused() -> None:
    run = partial(torch_checkpoint, use_reentrant=False, preserve_rng_state=False)
    pipe = GPipe(nn.Sequential(nn.Linear(8, 8), OwnCheckpoint(run)), [1, 1], chunks=2, checkpoint="never")
    with pipe, pytest.raises(UnkeyedRandomError, match=r"Remove preserve_rng_state=False"):
        pipe(torch.ones(4, 8)).sum().backward()


def test_checkpointing_inside_a_layer_that_does_not_draw_is_fine() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(4, 4)

        def forward(self, input: Tensor) -> Tensor:
            return torch_checkpoint(self.block, input, use_reentrant=False)

    with GPipe(nn.Sequential(nn.Linear(4, 4), Own()), [1, 1], chunks=2, checkpoint="always") as pipe:
        pipe(torch.ones(4, 4)).sum().backward()
        assert pipe[1].block.weight.grad is not None


class Alive(nn.Module):
    """Counts how many micro-batches' graphs are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def forward(self, input: Tensor) -> Tensor:
        self.now += 1
        self.peak = max(self.peak, self.now)
        output = input * 1
        output.register_hook(self._gone)
        return output

    def _gone(self, gradient: Tensor) -> None:
        self.now -= 1


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("partitions", [1, 2, 3, 4])
def test_1f1b_keeps_no_more_activations_than_partitions_that_follow(partitions: int, chunks: int) -> None:
    """GPipe keeps the activations of all micro-batches; this is what 1f1b is for."""
    model = nn.Sequential(*(Alive() for _ in range(partitions)))
    batch = torch.ones(chunks, 1, requires_grad=True)
    with GPipe(model, [1] * partitions, chunks=chunks, checkpoint="never", schedule="1f1b") as pipe:
        pipe.step(batch, batch.detach(), functional.mse_loss)
    assert [layer.peak for layer in model] == [min(chunks, partitions - index) for index in range(partitions)]


@pytest.mark.parametrize(("partitions", "chunks"), [(4, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_fewer_micro_batches_than_partitions_work(partitions: int, chunks: int, schedule: str) -> None:
    """pytorch#171312, PiPPy#1064: one micro-batch hung."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(partitions)))
    with GPipe(model, [1] * partitions, chunks=chunks, schedule=schedule) as pipe:
        pipe.step_timeout = 60
        pipe.step(torch.ones(2, 2), torch.ones(2, 2), functional.mse_loss)


def test_deferred_batch_norm_commits_once_per_mini_batch_even_with_fewer_rows_than_chunks() -> None:
    """torchgpipe waited for `chunks` micro-batches and mixed two mini-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.Conv1d(2, 2, 1)).double()
    whole = copy.deepcopy(model)
    input = torch.randn(3, 2, 5).double() + 10
    with GPipe(model, [2, 1], chunks=8, deferred_batch_norm=True, checkpoint="always") as pipe:
        for step in range(1, 3):
            pipe(input).sum().backward()
            whole(input)
            assert pipe[1].num_batches_tracked == step
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(pipe[1], name), getattr(whole[1], name), rtol=1e-12, atol=0)


def test_deferred_batch_norm_forgets_a_mini_batch_that_failed() -> None:
    class Fail(nn.Module):
        fails = True

        def forward(self, input: Tensor) -> Tensor:
            if self.fails and current_microbatch().index == 1:
                raise ValueError("not this time")
            return input

    model = nn.Sequential(nn.BatchNorm1d(2), Fail())
    with GPipe(model, [1, 1], chunks=2, deferred_batch_norm=True) as pipe:
        with pytest.raises(ValueError, match="not this time"):
            pipe(torch.full((4, 2), 1e6))
        assert pipe[0].num_batches_tracked == 0
        pipe[1].fails = False
        pipe(torch.zeros(4, 2))
    assert torch.equal(pipe[0].running_mean, torch.zeros(2))


def test_the_training_script_of_the_logging_guide_runs_without_a_gpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its original ended in an IndexError there: no devices were given."""
    caplog.set_level(logging.DEBUG, logger="gpipe_cli")
    layers = [nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)]
    model = nn.Sequential(*layers)
    model = GPipe(model, balance=[2, 2, 1], chunks=4)
    hooks = register_layer_logging_hooks(model.partitions)
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.CrossEntropyLoss()
    for _ in range(2):
        inputs = torch.randn(32, 100)
        targets = torch.randint(0, 10, (32,))
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
    for hook in hooks:
        hook.remove()
    model.close()
    assert "Executing layer '4' in partition 2: Linear [micro-batch 3]" in caplog.messages


def test_the_examples_of_torchgpipes_guide_run_without_a_gpu() -> None:
    a, b, c, d = (nn.Linear(4, 4) for _ in range(4))
    model = GPipe(nn.Sequential(a, b, c, d), balance=[1, 1, 1, 1], devices=["cpu"] * 4, chunks=8)
    in_device, out_device = model.devices[0], model.devices[-1]
    input, target = torch.randn(16, 4), torch.randint(4, (16,))
    input = input.to(in_device, non_blocking=True)
    target = target.to(out_device, non_blocking=True)
    output = model(input)
    functional.cross_entropy(output, target).backward()
    assert a.weight.grad is not None
    model.close()
    with pytest.raises(TypeError, match="non-sequential module cannot be partitioned"):
        GPipe(nn.Bilinear(1, 1, 1), balance=..., chunks=...)


def test_recurrent_dropout_and_attention_are_keyed() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 8, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, input: Tensor) -> Tensor:
            return self.gru(input)[0]

    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), Recurrent(), attention, nn.Linear(8, 8))
    plain = plain_pipe(copy.deepcopy(model), chunks=2)
    input = torch.randn(4, 3, 8)
    with GPipe(model, [2, 2], chunks=2, checkpoint="always") as pipe:
        losses = [each.step(input, input, functional.mse_loss, key=3) for each in (pipe, plain)]
    assert torch.equal(*losses)
    for (name, mine), theirs in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_hooks_on_layers_and_parameters_still_fire() -> None:
    fired: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_hook(lambda layer, args, output: fired.append("forward"))
    model[1].register_full_backward_hook(lambda layer, inputs, outputs: fired.append("backward"))
    model[1].weight.register_post_accumulate_grad_hook(lambda leaf: fired.append("accumulated"))
    with GPipe(model, [1, 1], chunks=2, checkpoint="never") as pipe:
        pipe.step(torch.ones(2, 2), torch.ones(2, 2), functional.mse_loss)
    assert sorted(fired) == ["accumulated"] * 2 + ["backward"] * 2 + ["forward"] * 2
