"""Models that a recording would not repeat are refused when they are traced, or when a batch arrives that differs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.build.layer_check import meta_output
from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential import to_sequential


class Model(nn.Module):
    """Runs `between` between two modules."""

    def __init__(self, between: Callable[[Model, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("steps", torch.zeros(()))
        self.between = between

    def forward(self, ids: Tensor) -> Any:
        return self.second(self.between(self, ids, self.first(ids)))


def ids(batch: int, length: int) -> Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 10


def assign_buffer(model: Model, _ids: Tensor, hidden: Tensor) -> Tensor:
    model.steps = model.steps + 1
    return hidden


def ask_for_gradients(_model: Model, _ids: Tensor, hidden: Tensor) -> Tensor:
    return hidden * 2 if hidden.requires_grad else hidden


def use_numpy(_model: Model, ids: Tensor, hidden: Tensor) -> Tensor:
    return hidden * float(ids.numpy()[0, 0])


def draw_with_numpy(_model: Model, _ids: Tensor, hidden: Tensor) -> Tensor:
    return hidden if np.random.rand() < 2 else hidden * 2


def draw_with_python(_model: Model, _ids: Tensor, hidden: Tensor) -> Tensor:
    return hidden if random.random() < 2 else hidden * 2


def disable_gradients(model: Model, _ids: Tensor, hidden: Tensor) -> Any:
    with torch.no_grad():
        return model.second(hidden)


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (assign_buffer, r"test_guards\.py:\d+ .*: it assigns to its 'steps'; write in place"),
        (ask_for_gradients, r"test_guards\.py:\d+ .*: it asks whether a computed tensor requires gradients"),
        (use_numpy, r"test_guards\.py:\d+ .*: it computes with values of tensors outside torch"),
        (draw_with_numpy, "it draws from Python's random or NumPy's"),
        (draw_with_python, "it draws from Python's random or NumPy's"),
        (disable_gradients, r"test_guards\.py:\d+ `return model\.second\(hidden\)`: it calls modules"),
    ],
)
def test_what_a_recording_would_not_repeat_is_refused(
    between: Callable[[Model, Tensor, Tensor], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        to_sequential(Model(between), ids(2, 6))


def test_parameters_answer_whether_they_require_gradients() -> None:
    def freeze(model: Model, _ids: Tensor, hidden: Tensor) -> Tensor:
        return hidden * 2 if model.second[0].weight.requires_grad else hidden

    for required in (True, False):
        model = Model(freeze).requires_grad_(required)
        assert torch.equal(to_sequential(model, ids(2, 6))(ids(2, 6)), model(ids(2, 6)))


def test_the_smallest_sizes_are_refused_if_the_model_does_something_else_there() -> None:
    def double_small(_model: Model, ids: Tensor, hidden: Tensor) -> Tensor:
        hidden = hidden * 2 if ids.shape[0] == 1 else hidden
        return hidden * 3 if ids.shape[1] == 1 else hidden + torch.arange(ids.shape[1])[:, None]

    model = Model(double_small)
    sequence = to_sequential(model, ids(2, 6))
    assert torch.equal(sequence(ids(4, 9)), model(ids(4, 9)))
    with pytest.raises(
        ValueError, match=r"dimension 0 of input is 1, but .* at least 2; use larger micro-batches"
    ):
        sequence(ids(1, 6))
    with pytest.raises(ValueError, match=r"dimension 1 of input is 1, but .* from 2 to 256; trace it with"):
        sequence(ids(2, 1))


def test_a_length_is_not_read_from_a_tensor_that_has_it_at_small_sizes_only() -> None:
    def clip(_model: Model, ids: Tensor, hidden: Tensor) -> Tensor:
        return hidden[:, :8]

    class Scaled(Model):
        def forward(self, ids: Tensor) -> Any:
            return super().forward(ids) * torch.arange(ids.shape[1]).sum()

    model = Scaled(clip)
    sequence = to_sequential(model, ids(2, 8))
    for length in (5, 8, 16):
        assert torch.equal(sequence(ids(2, length)), model(ids(2, length)))


def test_a_train_method_that_layers_do_not_call_is_refused() -> None:
    class KeepsStatistics(Model):
        def train(self, mode: bool = True) -> KeepsStatistics:
            super().train(mode)
            self.norm.eval()
            return self

    def normalize(model: Model, _ids: Tensor, hidden: Tensor) -> Any:
        return model.norm(hidden.flatten(0, 1))

    with pytest.raises(ConfigError, match=r"train\(True\) leaves 'norm' in another mode"):
        to_sequential(KeepsStatistics(normalize), ids(2, 6))


def test_a_model_with_mixed_modes_is_compared_in_those() -> None:
    def drop(model: Model, _ids: Tensor, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(hidden, 0.5, model.second.training)

    model = Model(drop)
    to_sequential(model, ids(2, 6))
    model.second.eval()
    with pytest.raises(ConfigError, match="the traced layers return something else"):
        to_sequential(model, ids(2, 6))


class Masked(Model):
    def forward(self, ids: Tensor, mask: Tensor, scale: float = 1.0) -> Any:
        return self.second(self.between(self, mask, self.first(ids) * mask[..., None] * scale))


def test_decisions_on_where_the_padding_is_are_refused() -> None:
    def is_left_padded(_model: Model, mask: Tensor, hidden: Tensor) -> Tensor:
        return hidden if mask[:, 0].all() else hidden * 2

    def longest(_model: Model, mask: Tensor, hidden: Tensor) -> Tensor:
        return hidden.view(-1, 6, 4)[:, : int(mask.sum(1).max())].sum(1)

    sample = {"ids": ids(2, 6), "mask": torch.ones(2, 6, dtype=torch.int64)}
    with pytest.raises(ConfigError, match="the traced layers return something else"):
        to_sequential(Masked(is_left_padded), sample)
    with pytest.raises(ConfigError, match=r"Masked cannot be traced: .* went on with 6 .*, and now it is"):
        to_sequential(Masked(longest), sample)


def test_constants_are_fixed_and_keys_may_come_in_any_order() -> None:
    model = Masked(lambda _model, _mask, hidden: hidden)
    sample: Any = {"ids": ids(2, 6), "mask": torch.ones(2, 6, dtype=torch.int64), "scale": 2.0}
    sequence = to_sequential(model, sample)
    assert torch.equal(sequence(dict(reversed(sample.items()))), model(**sample))
    with pytest.raises(ValueError, match=r"the batch has 3\.0 beside its tensors, .* traced with 2\.0"):
        sequence({**sample, "scale": 3.0})


def test_a_model_may_write_to_its_input_and_nothing_else_changes() -> None:
    def draw(_model: Model, _ids: Tensor, hidden: Tensor) -> Tensor:
        return hidden + torch.rand(4)

    class Writing(Model):
        def forward(self, ids: Tensor) -> Any:
            return super().forward(ids.add_(1))

    model = Writing(draw)
    state = torch.get_rng_state()
    sequence = to_sequential(model, ids(2, 5))
    assert torch.equal(torch.get_rng_state(), state)
    expected = model(ids(2, 5))
    torch.set_rng_state(state)
    assert torch.equal(sequence(ids(2, 5)), expected)


def test_a_model_with_hooks_around_it_is_refused_and_one_of_torch_is_cut() -> None:
    model = Model(lambda _model, _ids, hidden: hidden)
    model.register_forward_hook(lambda _module, _args, output: output * 2)
    with pytest.raises(ConfigError, match="Model cannot be cut: it has hooks or is compiled as a whole"):
        to_sequential(model, ids(2, 6))
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    sequence = to_sequential(encoder, torch.randn(2, 5, 4))
    input = torch.randn(3, 5, 4)
    assert len(sequence) == 3
    assert torch.equal(sequence(input), encoder(input))


def test_threads_may_trace_at_the_same_time() -> None:
    call = nn.Module.__call__
    names: list[tuple[str, ...]] = []

    def trace() -> None:
        model = Model(lambda _model, _ids, hidden: hidden)
        names.extend(to_sequential(model, ids(2, 6)).layer_names for _ in range(3))

    threads = [threading.Thread(target=trace) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == [("first.0", "first.1", "second.0", "second.1")] * 9
    assert nn.Module.__call__ is call


def test_an_error_of_the_model_restores_what_the_trace_replaced() -> None:
    def fail(_model: Model, _ids: Tensor, _hidden: Tensor) -> Tensor:
        raise ValueError("the model's own error")

    before = nn.Module.__call__, torch.autograd.Function.__dict__["apply"], torch.jit.ScriptFunction.__call__
    with pytest.raises(ConfigError, match="the model's own error"):
        to_sequential(Model(fail), ids(2, 6))
    assert before == (
        nn.Module.__call__,
        torch.autograd.Function.__dict__["apply"],
        torch.jit.ScriptFunction.__call__,
    )


class Counting(nn.Module):
    """Reads in Python how many tokens there are, which is a matter of values."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.count = count
        self.embed, self.first, self.second = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Any:
        return self.second(self.first(self.embed(tokens)) * self.count(tokens))


@pytest.mark.parametrize(
    "count",
    [
        lambda tokens: (tokens == 1).nonzero().shape[0],
        lambda tokens: len(torch.unique(tokens)),
        lambda tokens: tokens[tokens == 1].size(0),
        lambda tokens: tokens.masked_select(tokens == 1).numel(),
    ],
)
def test_a_number_of_rows_that_depends_on_values_is_checked(count: Any) -> None:
    """One end of text per row: the number of ends is that of rows, until a batch comes in which it is not."""
    model = Counting(count)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    tokens[:, -1] = 1
    sequence = to_sequential(model, tokens)
    assert torch.equal(sequence(tokens), model(tokens))
    with pytest.raises(
        RuntimeError, match=r"test_guards\.py:\d+ .* when the model was traced, and now it is"
    ):
        sequence(torch.arange(12).view(2, 6) % 9 + (torch.arange(12).view(2, 6) == 0))


def skip_at_random(share: float) -> Callable[[Model, Tensor, Tensor], Tensor]:
    """LayerDrop, as in OPT and BART."""
    return lambda _model, _ids, hidden: hidden * 2 if torch.rand([]) < share else hidden


def test_a_decision_on_values_goes_on_as_traced_where_there_are_none() -> None:
    """OPT draws a number per layer, also with layerdrop=0, and the command line could not determine its output."""
    sequence = to_sequential(Model(skip_at_random(0.0)), ids(2, 6))
    assert meta_output(sequence, ids(2, 6)).shape == (2, 6, 4)
    sequence = to_sequential(Model(skip_at_random(1e-12)), ids(2, 6))
    with (
        mock.patch("torch.rand", return_value=torch.zeros([])),
        pytest.raises(RuntimeError, match="went on with False when the model was traced, and now it is True"),
    ):
        sequence(ids(2, 6))


class Unpacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Any:
        left, right = self.first(input).view(-1, 2, 4).transpose(0, 1)
        return self.second(left * right)


def test_a_tensor_may_be_unpacked() -> None:
    model, input = Unpacking(), torch.randn(5, 4)
    sequence = to_sequential(model, torch.randn(2, 4))
    assert len(sequence) == 2
    assert torch.equal(sequence(input), model(input))
