"""Constructs of models that others wrote: traced and bitwise the original, or refused with the reason and its line.

`Language` is written as minGPT and nanoGPT are: functions in attributes that close over modules, an attention that
reads its dropout rate from an attribute, and outputs (logits, loss).
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential import to_sequential


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.Linear(8, 24)
        self.rate = dropout
        self.mlp = nn.ModuleDict({"fc": nn.Linear(8, 16), "act": nn.GELU(), "proj": nn.Linear(16, 8)})
        m = self.mlp
        self.mlpf = lambda x: m.proj(m.act(m.fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm(x)).view(*x.shape[:2], 2, 12).transpose(1, 2).split(4, dim=3)
        y = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.rate if self.training else 0, is_causal=True
        )
        return x + self.mlpf(x + y.transpose(1, 2).flatten(2))


class Language(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.h = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.head = nn.Linear(8, 11)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embed(idx)
        for block in self.h:
            x = block(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.view(-1, 11), targets.view(-1), ignore_index=-1)


IDS = torch.arange(24).view(4, 6) % 11


@pytest.mark.parametrize("leaves", [(), ["Block"]])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_language_model_with_closures_and_its_own_loss_trains_with_the_originals_bits(
    dropout: float, leaves: Any
) -> None:
    """The float 0.0 of training and the int 0 of evaluation counted as different, with a wrong reason given."""
    model = Language(dropout)
    twin = copy.deepcopy(model.state_dict())
    plain = Language(dropout)
    plain.load_state_dict(twin)
    sequence = to_sequential(model, {"idx": IDS, "targets": IDS}, leaves)
    assert all(torch.equal(value, twin[name]) for name, value in model.state_dict().items())
    assert len(sequence) >= 4
    if dropout:  # the masks of a pipe have keys of their own
        model.eval(), plain.eval()
    else:
        with GPipe(sequence, [2, len(sequence) - 2], chunks=2) as pipe:
            pipe.step({"idx": IDS, "targets": IDS}, IDS, lambda output, _target: output[1])
            for rows in (slice(0, 2), slice(2, 4)):
                _, loss = plain(IDS[rows], IDS[rows])
                assert loss is not None
                (loss / 2).backward()
            grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
        for name, parameter in plain.named_parameters():
            given, expected = grads[name], parameter.grad
            assert given is not None and expected is not None and torch.equal(given, expected), name
    for idx in (IDS, IDS[:3, :4].contiguous()):
        assert torch.equal(sequence.eval()({"idx": idx, "targets": idx})[0], plain.eval()(idx, idx)[0])


class Base(nn.Module):
    """Calls `between` between its blocks and its head."""

    def __init__(self, prepare: Callable[[Any], Any], between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)])
        self.head = nn.Linear(4, 2)
        self.between = between
        prepare(self)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(self.between(self, x))


def nothing(_model: Any) -> None: ...


def set_f(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        model.f = make(model)

    return prepare


def by_default_argument(model: Any) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor, block: Any = model.blocks[0]) -> Any:
        return block(x)

    return f


def over_a_tensor(model: Any) -> Callable[[Tensor], Tensor]:
    weight = model.head.weight
    return lambda x: x @ weight.T @ weight


class Scaling(nn.Module):
    def forward(self, x: Tensor, scale: Any) -> Any:
        return x * getattr(scale, "factor", scale)


class Settings:
    factor = 3.0


def add_scaling(model: Any) -> None:
    model.scaling, model.settings = Scaling(), Settings()


def remember(model: Any, x: Tensor) -> Tensor:
    """A cache is no state: it is made again wherever it is missing."""
    if getattr(model, "rows", None) != len(x):
        model.rows, model.positions = len(x), torch.arange(len(x))[:, None]
    return x + model.positions


@pytest.mark.parametrize(
    ("prepare", "between"),
    [
        (set_f(lambda model: lambda x: model.blocks[0](x)), lambda model, x: model.f(x)),
        (set_f(lambda model: [lambda x: model.head(x)]), lambda model, x: x * model.f[0](x).sum()),
        (set_f(lambda m: functools.partial(functional.linear, weight=m.head.weight)), lambda m, x: x * m.f(x).sum()),
        (set_f(lambda model: model.blocks[1].forward), lambda model, x: model.f(x)),
        (set_f(by_default_argument), lambda model, x: model.f(x)),
        (set_f(over_a_tensor), lambda model, x: model.f(x)),
        (set_f(lambda model: lambda x: functional.dropout(x, 0.5, model.training)), lambda model, x: model.f(x)),
        (nothing, lambda model, x: functional.dropout(x, False if model.training else 0.0)),
        (nothing, lambda model, x: x - x.sum(1 if model.training else 0, keepdim=True)),
        (nothing, lambda model, x: x * (-0.0 if model.training else 0.0)),
        (nothing, lambda _, x: x * np.float32(2) + torch.as_tensor(np.arange(4.0)).float()),
        (add_scaling, lambda model, x: model.scaling(model.scaling(x, model.settings), np.float64(2))),
        (nothing, remember),
    ],
)  # fmt: skip
def test_closures_and_arguments_of_any_kind_have_the_originals_bits(
    prepare: Callable[[Any], Any], between: Callable[[Any, Tensor], Any]
) -> None:
    model = Base(prepare, between)
    sequence = to_sequential(model, torch.randn(2, 4))
    assert len(sequence) > 3
    input = torch.randn(5, 4)
    for mode in (True, False):
        outputs = []
        for module in (model.train(mode), sequence.train(mode)):
            torch.manual_seed(0)
            outputs.append(module(input))
        assert torch.equal(*map(torch.signbit, outputs)) and torch.equal(*outputs)


CACHE: dict[int, Tensor] = {}


def use_cache(_model: Any, x: Tensor) -> Tensor:
    return x * CACHE.setdefault(len(x), torch.ones(len(x), 1))


def count(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x


def keep(model: Any, x: Tensor) -> Tensor:
    model.log.append(float(len(x)))
    return x


def fail_in_evaluation(model: Any, x: Tensor) -> Tensor:
    if not model.training:
        raise KeyError("no evaluation here")
    return x


class Outside(nn.Module):
    """Uses a block that it does not contain."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = [block]

    def forward(self, x: Tensor) -> Any:
        return self.blocks[0](x)


def reach_outside(model: Any) -> None:
    model.outside = Outside(model.blocks[0])


UNUSED_PARAMETER = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("prepare", "between", "reason"),
    [
        (nothing, lambda _, x: x / 2 if x.mean().item() > 0 else x, "it needs the values of tensors"),
        (nothing, lambda _, x: x + torch.tensor(np.tanh(x.detach().numpy())), "it needs the values of tensors"),
        (nothing, lambda _, x: x[: len(x) // 2 + 1], "an argument that it computes was 3 at other sizes, not 2"),
        (nothing, lambda _, x: x * 2 if len(x) % 2 else x, "it does not do the same at every size"),
        (nothing, lambda _, x: x @ torch.ones(3, 3), "reduction dim"),
        (nothing, fail_in_evaluation, "in evaluation: .*no evaluation here"),
        (set_f(lambda _: [nn.Linear(4, 4)]), lambda m, x: m.f[0](x), "not registered in"),
        (nothing, lambda _, x: nn.Linear(4, 4)(x), "not registered in"),
        (nothing, lambda _, x: x * UNUSED_PARAMETER, "not registered in"),
        (nothing, use_cache, "it uses a tensor that an earlier call made"),
        (lambda model: setattr(model, "calls", 0), count, "every call changes its attribute 'calls'"),
        (lambda model: setattr(model, "log", []), keep, "every call changes its attribute 'log'"),
        (set_f(lambda _: torch.Generator()), lambda m, x: x + torch.rand(4, generator=m.f), "a generator of its own"),
        (reach_outside, lambda model, x: model.outside(x), "'outside' stays whole and uses 'blocks.0'"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_reason_the_line_and_what_helps(
    prepare: Callable[[Any], Any], between: Callable[[Any, Tensor], Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        to_sequential(Base(prepare, between), torch.randn(2, 4))
    message = str(caught.value)
    assert re.search(reason, message), message
    assert re.search(r"test_models_of_others\.py:\d+ `", message), message
    assert re.search(r"; .*(model\.layers=\[blocks,head|must accept any number of samples)", message), message


def test_a_refusal_names_the_class_that_can_stay_whole() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = layer(x) if x.sum() < 0 else x + layer(x)
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Inner(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.inner(x))

    message = (
        r"'inner' \(Inner\) cannot be traced: .*: it needs the values of tensors .*; keep it whole with "
        r"'model\.leaves=\[Inner\]', or list the layers .* 'model\.layers=\[inner,head\]'"
    )
    with pytest.raises(ConfigError, match=message):
        to_sequential(Outer(), torch.randn(2, 4))
    assert len(to_sequential(Outer(), torch.randn(2, 4), ["Inner"])) == 2


def test_a_module_of_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'1\.weight' gets its shape from the first batch"):
        to_sequential(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), torch.randn(2, 4))


def test_a_scripted_module_stays_whole_and_keeps_its_statistics() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            self.first, self.norm, self.last = nn.Linear(4, 4), torch.jit.script(norm), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.norm(self.first(x)))

    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.script"):
        model = Scripted()
    before = copy.deepcopy(model.state_dict())
    sequence = to_sequential(model, torch.randn(2, 4))
    assert len(sequence) == 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_block_that_is_called_twice_and_has_closures_trains_with_the_originals_bits() -> None:
    """Its second layer holds a copy, whose functions must not use the modules of the first."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = nn.Linear(8, 8), Block(0.0), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.block(self.last(self.block(self.first(x))))

    model, input = Twice().double(), torch.randn(4, 3, 8, dtype=torch.float64)
    expected = torch.autograd.grad(model(input).mean(), list(model.parameters()))
    sequence = to_sequential(model, input, ["Block"])
    blocks = [layer.block for layer in sequence if hasattr(layer, "block")]
    assert [block.mlpf.__closure__[0].cell_contents is block.mlp for block in blocks] == [True, True]
    with GPipe(sequence, [2, len(sequence) - 2], chunks=1) as pipe:
        pipe.step(input, input, lambda output, _target: output.mean())
        for parameter, gradient in zip(pipe.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)


def test_a_classifier_without_a_pad_token_is_refused_with_what_to_set() -> None:
    class Classifier(Language):
        config = type("Config", (), {"pad_token_id": None})

        def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
            if len(idx) > 1 and self.config.pad_token_id is None:
                raise ValueError("Cannot handle batch sizes > 1 if no padding token is defined.")
            return super().forward(idx, targets)

    message = r"Classifier does not accept an input of shape 2x6 in training: .*; set pad_token_id in the model's conf"
    with pytest.raises(ConfigError, match=message):
        to_sequential(Classifier(), IDS[:1])
