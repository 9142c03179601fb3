"""Pipes take the keyword arguments of a model as a dict, in lengths that change from call to call."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.offload import OffloadModel
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.pytree import map_tensors
from gpipe_cli.skip.tracker import DictionarySkipTracker, use_skip_tracker
from tests.distributed.tasks import Task, make

CHUNKS = 3
CPU = torch.device("cpu")
PIPES: dict[str, Callable[[nn.Sequential], Any]] = {
    "one partition": lambda module: plain_pipe(module, chunks=CHUNKS),
    "four partitions": lambda module: GPipe(module, [1, 3, 1, 3], chunks=CHUNKS),
    "recomputed": lambda module: GPipe(module, [2, 4, 2], chunks=CHUNKS, checkpoint="always"),
    "a partition per layer": lambda module: GPipe(module, [1] * 8, chunks=CHUNKS, schedule="1f1b"),
    "slices": lambda module: OffloadModel(
        module, CPU, num_slices=3, checkpoint_activation=True, num_microbatches=CHUNKS
    ),
}


def plain(module: nn.Sequential, task: Task) -> list[Tensor | None]:
    """The loss and every gradient, micro-batch by micro-batch."""
    module.zero_grad()
    weights, losses = task.loss.row_weights(task.target), []
    for index in range(CHUNKS):
        input, target, weight = map_tensors(
            lambda tensor, index=index: tensor.tensor_split(CHUNKS)[index],  # type: ignore[misc]
            (task.input, task.target, weights),
        )
        with use_skip_tracker(DictionarySkipTracker()):
            loss = task.loss(module(input), target) * (float(weight.sum()) / float(weights.sum()))
        loss.backward()
        losses.append(loss.detach())
    return [torch.stack(losses).sum(), *(parameter.grad for parameter in module.parameters())]


def assert_same(given: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for mine, theirs in zip(given, expected, strict=True):
        assert mine is not None and theirs is not None and torch.equal(mine, theirs)


@pytest.mark.parametrize("make_pipe", PIPES.values(), ids=PIPES.keys())
def test_a_step_of_keyword_arguments_has_the_bits_of_the_plain_model(make_pipe: Callable[..., Any]) -> None:
    module = make("keyword_arguments", 4).model
    with make_pipe(copy.deepcopy(module)) as pipe:
        for rows in (7, 3, 9):
            task = make("keyword_arguments", rows)
            pipe.zero_grad()
            loss = pipe.step(task.input, task.target, task.loss)
            assert_same([loss, *(parameter.grad for parameter in pipe.parameters())], plain(module, task))


@pytest.mark.parametrize("make_pipe", PIPES.values(), ids=PIPES.keys())
def test_forward_and_backward_of_keyword_arguments(make_pipe: Callable[..., Any]) -> None:
    module = make("keyword_arguments", 4).model
    with make_pipe(copy.deepcopy(module)) as pipe:
        for rows in (7, 4):
            task = make("keyword_arguments", rows)
            pipe.zero_grad(), module.zero_grad()
            output, expected = pipe(task.input), module(task.input)
            torch.testing.assert_close(output, expected)
            task.loss(output, task.target).backward(), task.loss(expected, task.target).backward()
            for mine, theirs in zip(pipe.parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_mapping_and_constants_beside_the_tensors_reach_the_first_layer() -> None:
    """A tokenizer of Hugging Face returns a mapping that is no dict."""

    class Take(nn.Module):
        def forward(self, given: dict[str, Any]) -> Tensor:
            assert type(given) is dict and given["scale"] == 2
            return given["ids"] * given["scale"]

    ids = torch.arange(6.0)
    with GPipe(nn.Sequential(Take(), nn.Identity()), [1, 1], chunks=2) as pipe:
        assert torch.equal(pipe(UserDict(ids=ids, scale=2)), 2 * ids)
