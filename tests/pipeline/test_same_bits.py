"""What layers may do and hand to each other: every pipe gives the bits of plain autograd on the same micro-batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import current_microbatch
from gpipe_cli.skip import Namespace, pop, skippable, stash
from tests.support.pipes import (
    CHECKPOINTS,
    SCHEDULES,
    WIDTH,
    Do,
    Hands,
    Pop,
    Reentrant,
    Stash,
    balances,
    compare,
    linear,
)


class Point(NamedTuple):
    main: Any
    note: Any


class Residual(nn.Module):
    """Uses its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, input: Tensor) -> Tensor:
        return input + self.linear(input).tanh()


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        return self.lstm(input.unsqueeze(1).expand(-1, 4, -1))[0][:, -1]


class OwnGradient(nn.Module):
    """The forces of an energy: the layer runs a backward inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, input: Tensor) -> Tensor:
        point = input if input.requires_grad else input.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(point.tanh()).sum(), point, create_graph=True)
        return input + forces


class LateGradient(nn.Module):
    """Hands on a tensor that is detached in the first step and tracked later."""

    at_step = 0

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        second = input.sigmoid()
        return input, second if self.at_step else second.detach()


class LateWriter(nn.Module):
    """Begins to write its input in the second step."""

    at_step = 0

    def forward(self, input: Tensor) -> Tensor:
        return (input.add_(1) if self.at_step else input + 1) ** 2


class Counter(nn.Module):
    """Keeps state as users do: a buffer that decides the output, and one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * input.detach().mean(0)
        return input * self.calls + self.mean


class TensorHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, input: Tensor) -> Tensor:
        output = self.linear(input)
        output.register_hook(lambda gradient: gradient * 2)
        return output


class SometimesHooked(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        micro_batch = current_microbatch()
        if micro_batch is not None and micro_batch.index == 2:
            output.register_hook(lambda gradient: None)
        return output


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return input * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        ctx.runs = getattr(ctx, "runs", 0) + 1
        assert ctx.runs == 1, "a custom node ran twice"
        return gradient * weight, (gradient * input).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return Scaled.apply(input, self.weight)


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(self.linear(input))


class Token(nn.Module):
    """Returns a view of a parameter next to its input, as vision transformers do with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return input * 2, self.token.expand(len(input), -1)


class Nested(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: Tensor) -> Tensor:
        return self.inner(input)


def stashing(make: Callable[[Tensor], Tensor | None]) -> nn.Module:
    @skippable(stash=["skip"])
    class Stashing(nn.Module):
        def forward(self, input: Tensor) -> Iterator[Any]:
            yield stash("skip", make(input))
            return input * 2

    return Stashing()


@skippable(pop=["skip"])
class Pick(nn.Module):
    def forward(self, input: Tensor) -> Iterator[Any]:
        places = yield pop("skip")
        return input * input.gather(1, places)


def two_namespaces() -> list[nn.Module]:
    first, second = Namespace(), Namespace()
    return [
        linear(),
        Stash().isolate(first),
        nn.Tanh(),
        Stash().isolate(second),
        Pop().isolate(first),
        Pop().isolate(second),
    ]


def change_the_list(value: list[Any]) -> Tensor:
    value[2]["n"] += 1
    return value.pop(0) * value.pop(0) * value.pop(0)["n"]


def between(make: Callable[[Tensor], Any], use: Callable[[Any], Tensor]) -> list[nn.Module]:
    """Layers that hand a value on."""
    return [linear(), Do(make), nn.Identity(), Do(use), linear()]


VALUES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a number": (lambda x: (x, 3), lambda v: v[0] * v[1]),
    "a word": (lambda x: (x, "word"), lambda v: v[0] * len(v[1])),
    "None": (lambda x: (None, x, None), lambda v: v[1] if v[0] is None else v[0]),
    "a fraction first": (lambda x: (0.5, x), lambda v: v[0] * v[1]),
    "a truth": (lambda x: (True, x), lambda v: v[1] if v[0] is True else -v[1]),
    "a list": (lambda x: [x, x * 2], lambda v: v.pop() + v.pop()),
    "a list that changes": (lambda x: [x, x * 2, {"n": 1}], change_the_list),
    "a dict": (lambda x: {"a": x, "b": {"c": x * 2}}, lambda v: v["a"] + v["b"]["c"]),
    "an ordered dict": (lambda x: OrderedDict(z=x, a=x * 2), lambda v: next(iter(v.values())) * 3),
    "a named tuple": (lambda x: Point(x, "note"), lambda v: v.main * len(v.note)),
    "nested named tuples": (
        lambda x: Point(Point(x, [x * 2, None]), {"k": (1, x * 3)}),
        lambda v: v.main.main + v.main.note[0] + v.note["k"][1] * v.note["k"][0],
    ),
    "an empty tuple inside": (lambda x: (x, (), [], {}), lambda v: v[0] * (1 + len(v[1]))),
    "integers": (lambda x: (x, x.argmax(1, keepdim=True)), lambda v: v[0] * v[0].gather(1, v[1])),
    "a tensor without grad": (lambda x: (x, torch.arange(len(x))), lambda v: v[0] * v[1][:, None]),
    "a tensor without rows": (lambda x: (x, x.mean(), torch.tensor(2)), lambda v: v[0] * v[1] * v[2]),
    "a tensor with other rows": (lambda x: (x, x.mean(0)), lambda v: v[0] + v[1]),
    "a shape": (lambda x: (x, x.shape[1:]), lambda v: v[0] * v[1][0]),
    "a dtype": (lambda x: (x, torch.float32), lambda v: v[0].to(v[1])),
    "conjugates": (
        lambda x: (z := torch.complex(x, x * 0.5), z.conj()),
        lambda v: (v[0] * 2 + v[1]).abs(),
    ),
    "a real part": (
        lambda x: (z := torch.complex(x, x * 0.5), z.real),
        lambda v: (v[0] * 2 + v[1]).abs(),
    ),
    "a tensor that is not dense": (lambda x: x.repeat(1, 2)[:, :WIDTH], lambda v: v * v),
    "a transposed view": (lambda x: x.t().contiguous().t(), torch.tanh),
    "a view of all": (lambda x: x[:], torch.tanh),
}
LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "a tensor as value and as skip": lambda: [linear(), Stash(), nn.Tanh(), linear(), Pop(), linear()],
    "a tensor as skip and used twice": lambda: [linear(), Stash(), Residual(), linear(), Pop(), linear()],
    "a tensor twice in a tuple": lambda: [
        linear(),
        Do(lambda x: (x, x)),
        Do(lambda v: (v[0].tanh(), v[1])),
        Do(lambda v: v[0] * v[1] + v[0].sigmoid()),
        linear(),
    ],
    "a tensor three times in a tuple": lambda: [
        linear(),
        Do(lambda x: (x, x, x)),
        Do(lambda v: (v[0].tanh(), v[1].sigmoid(), v[2])),
        Do(lambda v: v[0] * v[1] + v[2].exp()),
        linear(),
    ],
    "a tensor in a tuple through several partitions": lambda: [
        linear(),
        Do(lambda x: (x, x.tanh(), x)),
        Do(lambda v: (v[0] * v[1], v[2])),
        Do(lambda v: (v[0].exp(), v[1])),
        Do(lambda v: v[0] * v[1]),
    ],
    "a skip into a nested layer": lambda: [linear(), Stash(), linear(), nn.Tanh(), Nested(Pop())],
    "skips of two namespaces": two_namespaces,
    "None as a skip": lambda: [stashing(lambda x: None), linear(), Pop()],
    "integers as a skip": lambda: [stashing(lambda x: x.argmax(1, keepdim=True)), linear(), Pick()],
    "an LSTM": lambda: [linear(), Lstm(), linear()],
    "a look at grad mode": lambda: [linear(), Do(lambda x: x * (2.0 if torch.is_grad_enabled() else 3.0))],
    "a gradient inside a forward": lambda: [linear(), OwnGradient(), linear()],
    "a tensor that is tracked later": lambda: [linear(), LateGradient(), Do(lambda v: v[0] + 3 * v[1])],
    "layers that write their input": lambda: [
        nn.LeakyReLU(0.1, inplace=True),
        linear(),
        nn.ReLU(inplace=True),
        linear(),
        nn.ELU(inplace=True),
    ],
    "a layer that uses what it writes": lambda: [linear(), Do(lambda x: x.add_(1) * x), linear()],
    "a layer that writes its input later": lambda: [linear(), LateWriter(), linear()],
    "a layer that writes what a partition passes": lambda: [
        nn.Identity(),
        Do(lambda x: x),
        nn.ReLU(inplace=True),
        linear(),
    ],
    "a detached copy that is written": lambda: [
        linear(),
        Do(lambda x: x * x.detach().clone().mul_(2)),
        linear(),
    ],
    "batch norm": lambda: [linear(), nn.BatchNorm1d(WIDTH), linear()],
    "cumulative batch norm": lambda: [linear(), nn.BatchNorm1d(WIDTH, momentum=None), linear()],
    "buffers": lambda: [linear(), Counter(), linear()],
    "spectral norm": lambda: [nn.utils.parametrizations.spectral_norm(linear()), linear()],
    "a buffer that is handed on": lambda: [linear(), Hands(), Do(lambda pair: pair[0] * pair[1])],
    "a view of a parameter": lambda: [Token(), Do(lambda pair: pair[0] * pair[1]), linear()],
    "a hook on a tensor": lambda: [linear(), TensorHook(), nn.Tanh(), linear()],
    # Its weights' gradients were added before those that earlier micro-batches had left for later.
    "a hook on a tensor of one micro-batch": lambda: [linear(), SometimesHooked(WIDTH, WIDTH), linear()],
    "a reentrant checkpoint": lambda: [linear(), Reentrant(), nn.Tanh(), linear()],
    "a function of one's own": lambda: [linear(), Custom(), nn.Tanh(), linear()],
    "a weight that is used twice": lambda: [linear(), UsedTwice()],
    "a frozen layer between others": lambda: [linear(), linear().requires_grad_(False), linear()],
    "frozen layers first": lambda: [linear().requires_grad_(False), nn.Tanh(), linear()],
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("kind", [*VALUES, *LAYERS])
def test_however_layers_are_cut_and_run_they_give_the_bits_of_plain_autograd(
    kind: str, checkpoint: str
) -> None:
    """Each of these once gave other bits, or an error, in some partition or mode."""
    torch.manual_seed(0)
    layers = between(*VALUES[kind]) if kind in VALUES else LAYERS[kind]()
    compare(layers, *balances(len(layers)), steps=2, checkpoint=checkpoint, schedules=SCHEDULES)
