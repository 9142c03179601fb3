"""Randomness is keyed by layer; nothing that other threads do changes a result or fails a step."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.pipeline.pipe import Pipe

pytestmark = pytest.mark.timeout(120)


@contextlib.contextmanager
def drawing(draw: Callable[[], object]) -> Iterator[None]:
    """Another thread draws all the time, as a prefetcher with random transforms does."""
    stop, drew = threading.Event(), threading.Event()

    def loop() -> None:
        while not stop.is_set():
            draw()
            drew.set()

    thread = threading.Thread(target=loop)
    thread.start()
    drew.wait(30)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def model_with_dropout() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4))


def pipe_with_dropout() -> GPipe:
    pipe = GPipe(model_with_dropout(), [2, 2], chunks=2, checkpoint="always")
    pipe.step_timeout = 60
    return pipe


def steps(pipe: Pipe, count: int) -> list[bytes]:
    input, target = torch.linspace(-1, 1, 16).reshape(4, 4), torch.ones(4, 4)
    results = []
    for key in range(count):
        pipe.zero_grad()
        loss = pipe.step(input, target, functional.mse_loss, key=key)
        tensors = [loss, *(leaf.grad for leaf in pipe.parameters())]
        results.append(b"".join(tensor.numpy().tobytes() for tensor in tensors))
    return results


@pytest.mark.parametrize("draw", [lambda: torch.rand(8), lambda: torch.manual_seed(1)], ids=["rand", "seed"])
@pytest.mark.parametrize("plain", [False, True], ids=["GPipe", "plain_pipe"])
def test_another_threads_draws_neither_fail_nor_change_a_step(
    draw: Callable[[], object], plain: bool
) -> None:
    """200 of 200 steps raised GeneratorMoved while a prefetcher drew."""
    expected = steps(plain_pipe(model_with_dropout(), chunks=2), 20)
    pipe = plain_pipe(model_with_dropout(), chunks=2) if plain else pipe_with_dropout()
    with pipe, drawing(draw):
        assert steps(pipe, 20) == expected


def test_two_pipes_in_two_threads_do_not_disturb_each_other() -> None:
    """66 of 100 steps raised."""
    expected = steps(plain_pipe(model_with_dropout(), chunks=2), 20)

    # Made one after the other: the seed of their parameters is the whole process's.
    pipes = [pipe_with_dropout(), pipe_with_dropout()]

    def work(pipe: GPipe) -> list[bytes]:
        torch.set_num_threads(1)
        with pipe:
            return steps(pipe, 20)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, pipes)) == [expected] * 2


def test_two_pipes_in_two_threads_draw_their_own_keys_without_failing() -> None:
    """66 of 100 steps raised: the key of one was taken for a draw of the other's layers."""
    pipes = [pipe_with_dropout(), pipe_with_dropout()]

    def work(pipe: GPipe) -> None:
        torch.set_num_threads(1)
        with pipe:
            for _ in range(50):
                pipe.step(torch.ones(4, 4), torch.ones(4, 4), functional.mse_loss)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, pipes))


def test_one_pipe_can_be_evaluated_by_four_threads_at_once() -> None:
    """58 of 200 calls raised."""
    with pipe_with_dropout() as pipe:
        pipe.eval()
        inputs = torch.randn(40, 4, 4).unbind()
        with torch.no_grad():
            expected = [torch.cat([pipe.module(piece) for piece in each.tensor_split(2)]) for each in inputs]

        def work(each: Tensor) -> Tensor:
            torch.set_num_threads(1)
            with torch.no_grad():
                return pipe(each)

        with ThreadPoolExecutor(4) as pool:
            outputs = list(pool.map(work, inputs))
    for mine, theirs in zip(outputs, expected, strict=True):
        assert torch.equal(mine, theirs)


class NumpyNoise(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input + float(np.random.rand())


class PythonNoise(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input + random.random()


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, input: Tensor) -> Tensor:
        return input + torch.rand(input.shape, generator=self.generator)


@pytest.mark.parametrize("noise", [NumpyNoise, OwnGenerator], ids=lambda each: each.__name__)
@pytest.mark.parametrize("plain", [False, True], ids=["GPipe", "plain_pipe"])
def test_a_layer_that_draws_past_its_key_is_warned_of_once_by_name(
    noise: type[nn.Module], plain: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), noise(), nn.Linear(4, 4))
    pipe = plain_pipe(model, chunks=2) if plain else GPipe(model, [2, 2], chunks=2, checkpoint="never")
    with pipe, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(pipe, 4)
    mine = [warning for warning in caught if issubclass(warning.category, UserWarning)]
    assert len(mine) == 1, [str(warning.message) for warning in mine]
    assert "'2'" in str(mine[0].message)
    for other in ("'0'", "'1'", "'3'"):
        assert other not in str(mine[0].message)


def test_each_layer_that_draws_past_its_key_is_warned_of_by_its_own_name() -> None:
    model = nn.Sequential(NumpyNoise(), nn.Linear(4, 4), OwnGenerator(), nn.Linear(4, 4))
    with GPipe(model, [2, 2], chunks=2, checkpoint="never") as pipe:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps(pipe, 4)
        messages = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert len(messages) == 2
    assert sum("'0'" in message for message in messages) == 1
    assert sum("'2'" in message for message in messages) == 1


def test_a_layer_is_not_blamed_for_what_another_thread_draws_with_numpy() -> None:
    with pipe_with_dropout() as pipe, drawing(lambda: np.random.rand()):
        steps(pipe, 20)  # a warning is an error here


def test_a_layer_that_begins_to_draw_later_is_keyed_at_once() -> None:
    """The first such step raised, and every one after it was slower."""
    results = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4))
        torch.manual_seed(0)
        for leaf in model.parameters():
            nn.init.normal_(leaf)
        with GPipe(model, [2, 1], chunks=2) as pipe:
            steps(pipe, 2)
            model[1].p = 0.5
            results.append(steps(pipe, 3))
    assert results[0] == results[1]
    assert len(set(results[0])) == 3, "each key draws other masks"


def test_the_default_generator_stays_where_it_was() -> None:
    with pipe_with_dropout() as pipe:
        before = torch.get_rng_state()
        steps(pipe, 3)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_governs_a_forward_without_key_though_another_pipe_ran_in_between() -> None:
    input = torch.ones(4, 4)
    with pipe_with_dropout() as pipe, pipe_with_dropout() as other:
        outputs = []
        for interrupts in (False, True):
            torch.manual_seed(5)
            if interrupts:
                other.step(input, input, functional.mse_loss, key=1)
            outputs.append(pipe(input).detach())
    assert torch.equal(*outputs)
