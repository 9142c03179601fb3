"""The kernels above autograd: random operators get our generator, all others are left as they are."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss
from torch.utils.flop_counter import FlopCounterMode

from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.torch_internals.keyed_random import (
    BACKWARD,
    PROBABILITIES,
    KeyedRandom,
    _random_operators,
    _with_generator,
)

IMAGES, ROWS, TOKENS = (2, 3, 8, 8), (4, 16), (4, 7, 16)
HALF = torch.full((64,), 0.5)


def keyed(seed: int = 1, reports: list[str] | None = None) -> contextlib.AbstractContextManager[KeyedRandom]:
    """One source, whose draws past its key are a failure unless they are to be reported."""

    def unkeyed(source: object, what: str) -> None:
        assert reports is not None, f"{source} draws with {what}"
        reports.append(what)

    random = KeyedRandom(lambda source: seed, unkeyed)
    random.source = "layer"
    return random


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(16, 16), ROWS),
        (nn.Linear(16, 16), TOKENS),
        (nn.Conv2d(3, 4, 3), IMAGES),
        (nn.BatchNorm2d(3), IMAGES),
        (nn.LayerNorm(16), TOKENS),
        (nn.GroupNorm(1, 3), IMAGES),
        (nn.MaxPool2d(2), IMAGES),
        (nn.GELU(), ROWS),
        (nn.GRU(16, 16, 2), TOKENS),
        (nn.LSTM(16, 16, bidirectional=True), TOKENS),
        (nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), TOKENS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_a_layer_that_draws_nothing_gives_the_same_bits_under_a_key(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    """And is not told of, nor is a generator seeded for it."""
    input = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).requires_grad_()
    seeds: list[object] = []

    def unkeyed(source: object, what: str) -> None:
        raise AssertionError(what)

    def results(context: contextlib.AbstractContextManager[Any]) -> list[Tensor | None]:
        with context:
            output = layer(input)
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()
        gradients = [tensor.grad for tensor in (input, *layer.parameters())]
        input.grad = None
        layer.zero_grad()
        return [output, *gradients]

    under_key = KeyedRandom(lambda source: seeds.append(source) or 1, unkeyed)  # type: ignore[func-returns-value]
    pairs = zip(results(contextlib.nullcontext()), results(under_key), strict=True)
    assert all(torch.equal(plain, mine) for plain, mine in pairs)
    assert seeds == []


ones = torch.ones(64)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(64),
    "rand_like": lambda: torch.rand_like(ones),
    "rand_out": lambda: torch.rand(64, out=torch.empty(64)),
    "randn": lambda: torch.randn(64),
    "randn_like": lambda: torch.randn_like(ones),
    "randint": lambda: torch.randint(1000, (64,)),
    "randint_low": lambda: torch.randint(5, 1000, (64,)),
    "randint_like": lambda: torch.randint_like(ones, 1000),
    "randint_like_low": lambda: torch.randint_like(ones, 5, 1000),
    "randperm": lambda: torch.randperm(64),
    "normal": lambda: torch.normal(0.0, 1.0, (64,)),
    "normal_tensor_float": lambda: torch.normal(ones, 1.0),
    "normal_float_tensor": lambda: torch.normal(0.0, ones),
    "normal_tensors": lambda: torch.normal(ones, ones),
    "bernoulli": lambda: torch.bernoulli(HALF),
    "bernoulli_p": lambda: torch.bernoulli(HALF, 0.5),
    "multinomial": lambda: torch.multinomial(ones, 40),
    "poisson": lambda: torch.poisson(ones * 50),
    "binomial": lambda: torch.binomial(ones * 50, HALF),
    "gamma": lambda: torch._standard_gamma(ones),
    "dirichlet": lambda: torch._sample_dirichlet(ones),
    "uniform_": lambda: torch.empty(64).uniform_(),
    "normal_": lambda: torch.empty(64).normal_(),
    "cauchy_": lambda: torch.empty(64).cauchy_(),
    "exponential_": lambda: torch.empty(64).exponential_(),
    "geometric_": lambda: torch.empty(64).geometric_(0.1),
    "log_normal_": lambda: torch.empty(64).log_normal_(),
    "random_": lambda: torch.empty(64).random_(),
    "random_to": lambda: torch.empty(64).random_(1000),
    "random_range": lambda: torch.empty(64).random_(5, 1000),
    "bernoulli_float_": lambda: torch.empty(64).bernoulli_(0.5),
    "bernoulli_tensor_": lambda: torch.empty(64).bernoulli_(HALF),
    "dropout": lambda: functional.dropout(ones, 0.5),
    "dropout_": lambda: functional.dropout(ones.clone(), 0.5, inplace=True),
    "native_dropout": lambda: torch.native_dropout(ones, 0.5, True)[0],
    "alpha_dropout": lambda: functional.alpha_dropout(ones, 0.5, training=True),
    "feature_dropout": lambda: functional.dropout1d(torch.ones(1, 64, 2), 0.5),
    "feature_alpha_dropout": lambda: functional.feature_alpha_dropout(torch.ones(1, 64, 2), 0.5, True),
    "rrelu": lambda: functional.rrelu(-ones, training=True),
    "gumbel_softmax": lambda: functional.gumbel_softmax(ones),
    "fractional_max_pool": lambda: functional.fractional_max_pool2d(
        torch.arange(1600.0).reshape(1, 1, 40, 40), 2, output_size=(12, 12)
    ),
    "distribution": lambda: torch.distributions.Beta(ones, ones).sample(),
    "reparametrized": lambda: torch.distributions.StudentT(ones * 3).rsample(),
    "kaiming": lambda: nn.init.kaiming_uniform_(torch.empty(8, 8)),
    "trunc_normal": lambda: nn.init.trunc_normal_(torch.empty(64)),
    "attention": lambda: functional.scaled_dot_product_attention(
        *[torch.arange(64.0).reshape(1, 1, 8, 8)] * 3, dropout_p=0.5
    ),
    "recurrent": lambda: nn.GRU(4, 4, 2, dropout=0.5)(torch.ones(8, 3, 4))[0],
    "bfloat16": lambda: torch.rand(64, dtype=torch.bfloat16),
    "complex": lambda: torch.randn(64, dtype=torch.complex64),
}

CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "with_grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "flop_counter": lambda: FlopCounterMode(display=False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("draw", DRAWS)
def test_the_seed_decides_what_is_drawn_and_the_default_generator_stays(draw: str, context: str) -> None:
    def drawn(seed: int) -> Tensor:
        with CONTEXTS[context](), keyed(seed):
            return DRAWS[draw]()

    state = torch.get_rng_state()
    first, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("draw", DRAWS)
def test_a_mode_entered_inside_the_key_does_not_let_a_draw_past_it(draw: str) -> None:
    def drawn(mode: contextlib.AbstractContextManager[object]) -> Tensor:
        with keyed(), mode:
            return DRAWS[draw]()

    state = torch.get_rng_state()
    assert torch.equal(drawn(contextlib.nullcontext()), drawn(FlopCounterMode(display=False)))
    assert torch.equal(state, torch.get_rng_state())


def test_every_operator_that_draws_is_keyed_or_says_whether_it_would_draw() -> None:
    """An operator of a later torch that is neither would be told of in every layer that uses it, or in none."""
    operators = {str(op): op for op in _random_operators()}
    assert {"aten.bernoulli_.float", "aten.rand.default", "aten.native_dropout.default"} <= set(operators)
    silent = {
        name
        for name, op in operators.items()
        if _with_generator(op) is None
        and not set(PROBABILITIES) & {argument.name for argument in op._schema.arguments}
    }
    assert silent == set()


def test_each_source_draws_from_its_own_seed_however_often_the_source_changes() -> None:
    random = KeyedRandom(ord, lambda source, what: None)
    drawn: dict[str, list[Tensor]] = {"a": [], "b": []}
    for names in ("ab", "ba"):
        with random:
            for name in names:
                random.source = name
                drawn[name].append(torch.cat([torch.rand(4), torch.rand(4)]))
    assert torch.equal(*drawn["a"]) and torch.equal(*drawn["b"])
    assert not torch.equal(drawn["a"][0], drawn["b"][0])
    assert not torch.equal(drawn["a"][0][:4], drawn["a"][0][4:])


def test_what_draws_in_backward_is_keyed_by_its_node() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, input: Tensor) -> Tensor:
            return input.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient + torch.rand(4)

    sources: list[int] = []
    random = KeyedRandom(lambda number: sources.append(number) or 7, lambda source, what: None)  # type: ignore[func-returns-value]
    input = torch.zeros(4, requires_grad=True)
    output = Noisy.apply(Noisy.apply(input)).sum()
    random.source = BACKWARD
    gradients = []
    for _ in range(2):
        with random:
            gradients += torch.autograd.grad(output, input, retain_graph=True)
    assert torch.equal(*gradients)
    assert len(set(sources)) == 2 and sources[:2] == sources[2:]


def test_a_pipe_in_a_layer_of_another_leaves_the_outer_draws_as_they_are() -> None:
    def drawn(inner: bool) -> Tensor:
        with keyed(1):
            first = torch.rand(4)
            if inner:
                with keyed(2):
                    torch.rand(4)
            return torch.cat([first, torch.rand(4)])

    assert torch.equal(drawn(False), drawn(True))


def test_other_threads_draw_from_the_default_generator_as_ever() -> None:
    def in_a_thread() -> Tensor:
        drawn: list[Tensor] = []
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(4)))
        thread.start()
        thread.join()
        return drawn[0]

    torch.manual_seed(0)
    plain = in_a_thread()
    torch.manual_seed(0)
    with keyed():
        assert torch.equal(in_a_thread(), plain)
    assert not torch.equal(torch.rand(4), torch.rand(4))


def test_after_an_error_the_thread_draws_from_the_default_generator_again() -> None:
    torch.manual_seed(0)
    plain = torch.rand(4)
    with pytest.raises(ZeroDivisionError), keyed():
        raise ZeroDivisionError
    torch.manual_seed(0)
    assert torch.equal(torch.rand(4), plain)


def test_the_fused_dropout_of_cuda_is_replaced_by_an_equal() -> None:
    input = torch.ones(1000, requires_grad=True)
    with keyed(3):
        output, mask = torch.native_dropout(input, 0.25, True)
    output.sum().backward()
    assert torch.equal(output != 0, mask)
    assert torch.equal(output[mask], torch.full_like(output[mask], 1 / 0.75))
    assert torch.equal(input.grad, output)
    assert 0.7 < mask.float().mean() < 0.8


def test_an_operator_that_takes_no_generator_is_told_by_name_only_if_it_would_draw() -> None:
    query = torch.randn(1, 1, 4, 4)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    reports: list[str] = []
    with keyed(0, reports):
        attention(query, query, query)
        assert reports == []
        with contextlib.suppress(RuntimeError):  # the kernel itself refuses it on the CPU
            attention(query, query, query, 0.5)
    (report,) = reports
    assert "flash_attention_for_cpu" in report and "takes no generator" in report


def test_a_generator_of_the_layers_own_is_used_and_told() -> None:
    own, twin = (torch.Generator().manual_seed(5) for _ in range(2))
    reports: list[str] = []
    with keyed(0, reports):
        drawn = torch.rand(4, generator=own)
    assert torch.equal(drawn, torch.rand(4, generator=twin))
    assert set(reports) == {"a torch.Generator of its own"}


def test_a_layer_can_save_and_restore_the_state_that_it_draws_from() -> None:
    default = torch.get_rng_state()
    with keyed():
        first = torch.rand(4)
        state = torch.get_rng_state()
        second = torch.rand(4)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(4), second) and not torch.equal(first, second)
        with torch.random.fork_rng(devices=[]):
            third = torch.rand(4)
        assert torch.equal(torch.rand(4), third)
    assert torch.equal(torch.get_rng_state(), default)


@pytest.mark.slow
def test_a_step_does_not_import_the_compiler() -> None:
    """torch hides a dispatch mode from its compiler by importing it: two seconds at everybody's first step."""
    script = (
        "import sys, torch\n"
        "from gpipe_cli import GPipe\n"
        "pipe = GPipe(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()), [1, 1], chunks=2)\n"
        "pipe.step(torch.rand(4, 4), torch.rand(4, 4), torch.nn.functional.mse_loss)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_compiled_layer_draws_under_its_key_without_being_compiled_anew() -> None:
    """Hidden after all where there is a compiler: else it recompiled until it gave up, and said so."""

    def losses() -> list[float]:
        torch.manual_seed(0)
        layer = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout()), backend="eager")
        pipe = plain_pipe(nn.Sequential(layer, nn.Linear(8, 2)), chunks=4)
        return [float(pipe.step(torch.ones(8, 8), torch.zeros(8, 2), mse_loss, key=key)) for key in (1, 2, 1)]

    compiled = losses()
    assert compiled[0] == compiled[2] != compiled[1]


@pytest.fixture
def fake_cudnn() -> Iterator[list[int]]:
    """cuDNN's kernels for tensors of the CPU; the list receives the seeds of the dropout states they draw from."""
    seeds: list[int] = []

    def init_dropout_state(dropout: float, train: bool, dropout_seed: int, **options: Any) -> Tensor:
        return torch.tensor([dropout_seed])

    def rnn(input: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        state = arguments[-1]
        if state is not None:
            seeds.append(int(state))
        return (input.clone(), *(torch.empty(0) for _ in range(4)))

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cudnn_init_dropout_state", init_dropout_state, "CPU")
        library.impl("_cudnn_rnn", rnn, "CPU")
        yield seeds


def test_recurrent_layers_of_cudnn_draw_from_a_state_of_the_key(fake_cudnn: list[int]) -> None:
    """cuDNN keeps its state from call to call, so recompute and other splits drew other masks."""

    def call(dropout: float) -> None:
        input = torch.ones(2, 2)
        torch.ops.aten._cudnn_rnn(
            input, [], 4, None, input, None, 2, 2, 0, 2, False, dropout, True, False, [], None
        )

    for seed in (1, 1, 2):
        with keyed(seed):
            call(0.5)
            call(0.5)
            call(0.0)
    first, second = fake_cudnn[:2]
    assert first != second
    assert fake_cudnn[2:4] == [first, second]
    assert len({*fake_cudnn}) == 4
