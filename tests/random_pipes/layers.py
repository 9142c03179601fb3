"""The layers that random pipes are made of.

The main tensor of a value is its first one, of shape (rows, WIDTH). A layer changes that tensor and passes the rest of
the value on, so any layer fits behind any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gpipe_cli.skip import pop, skippable, stash

WIDTH = 6


class Point(NamedTuple):
    main: Any
    weight: Any


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a value, depth first."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def rebuilt(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same containers and passengers with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)((key, rebuilt(item, change)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuilt(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(rebuilt(item, change) for item in value)
    return value


def with_main(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    main, *rest = tensors_in(value)
    changed = iter([change(main), *rest])
    return rebuilt(value, lambda _: next(changed))


class Main(nn.Module):
    """Runs a layer on the main tensor of a container."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Any) -> Any:
        return with_main(value, self.layer)


class Do(nn.Module):
    """A function as a layer."""

    def __init__(self, name: str, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.name = name
        self.function = function

    def extra_repr(self) -> str:
        return self.name

    def forward(self, value: Any) -> Any:
        return self.function(value)


class Saving(torch.autograd.Function):
    """x squared, with what it needs in saved tensors."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return input * input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (input,) = ctx.saved_tensors
        return 2 * input * gradient


class NotSaving(torch.autograd.Function):
    """A scaled copy; nothing is saved."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input * 0.75

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.75


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH // 2, WIDTH // 2, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        output, _ = self.gru(input.reshape(-1, 2, WIDTH // 2))
        return output.reshape(-1, WIDTH)


class Lstm(nn.Module):
    """Its kernel depends on grad mode, and with it the bits."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH // 2, WIDTH // 2, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        output, _ = self.lstm(input.reshape(-1, 2, WIDTH // 2))
        return output.reshape(-1, WIDTH)


class Encoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(WIDTH // 3, 2, 4, dropout, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        return self.encoder(input.reshape(-1, 3, WIDTH // 3)).reshape(-1, WIDTH)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        return input + self.linear(input).tanh()


class OwnCheckpoint(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Tanh())

    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(self.block, input, use_reentrant=False)


class Average(nn.Module):
    """Keeps a moving mean in a buffer that decides the output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * input.detach().float().mean(0).to(self.mean.dtype)
        return input - self.mean


class Late(nn.Module):
    """Begins to do something in the second round: `round` is set by the caller."""

    round = 0


class LateCount(Late):
    """Counts in a buffer from the second round on, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("count", None if how == "none" else torch.zeros(WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        if self.count is None:
            self.count = input.new_zeros(WIDTH)
        if self.training and self.round:
            if self.how == "replace":
                self.count = self.count + 1
            else:
                (self.count.data if self.how == "data" else self.count).add_(1)
        return input * (1 + 0.125 * self.count)


class LateGradient(Late):
    """Hands on a second tensor that takes part in backward from the second round on only."""

    def forward(self, value: Any) -> Any:
        main, *rest = tensors_in(value)
        second = main.sigmoid()
        return (main, second if self.round else second.detach(), *rest)


class ParameterCount(nn.Module):
    """Counts in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.count.add_(1)
        return input + 0.125 * self.count.detach().clone()


class Hooked(nn.Module):
    """Doubles the gradient of a tensor between its operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        output = self.linear(input)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 2)
        return output.tanh()


class OwnGradient(nn.Module):
    """Runs a backward inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        with torch.enable_grad():
            point = input.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.linear(point).tanh().sum(), point)
        return self.linear(input) + gradient


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.first(input)
        return (
            checkpoint(self.block, hidden, use_reentrant=True) if hidden.requires_grad else self.block(hidden)
        )


class Holder(nn.Module):
    """Holds a module that other layers hold too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input: Tensor) -> Tensor:
        return self.module(input)


class Branch(nn.Module):
    """Gives its gradient to half of what it was given."""

    def forward(self, input: Tensor) -> Tensor:
        return input * input.detach()


@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, value: Any):
        main = tensors_in(value)[0]
        yield stash("skip", main * 2 if self.copies else main)
        return value


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, value: Any):
        skipped = yield pop("skip")
        return with_main(value, lambda main: main + skipped)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def write_a_view(input: Tensor) -> Tensor:
    input[:, : WIDTH // 2].mul_(0.5)
    return input


def write_a_copied_view(input: Tensor) -> Tensor:
    whole = input * 1.25
    whole[:, 1].add_(input[:, 0])
    return whole


def write_last(value: Any) -> Any:
    *_, last = tensors_in(value)
    last.mul_(0.5)
    return value


def fourier(input: Tensor) -> Tensor:
    return torch.fft.ifft(torch.fft.fft(input) * (0.5 + 0.25j)).real


def imaginary(input: Tensor) -> Tensor:
    return torch.complex(input, input * 0.5)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def compiled(backend: str) -> nn.Module:
    return torch.compile(nn.Sequential(linear(), nn.Tanh()), backend=backend)


# A layer of each of these changes one tensor. LeakyReLU and the writers may come first: they write the input.
PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "tanh": nn.Tanh,
    "leaky_relu_": lambda: nn.LeakyReLU(0.1, inplace=True),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "gru": Gru,
    "encoder": lambda: Encoder(0.0),
    "saving_function": lambda: Do("saving_function", Saving.apply),
    "not_saving_function": lambda: Do("not_saving_function", NotSaving.apply),
    "mul_": lambda: Do("mul_", lambda x: x.mul_(1.5)),
    "add_": lambda: Do("add_", lambda x: x.add_(0.5)),
    "write_a_view": lambda: Do("write_a_view", write_a_view),
    "write_a_copied_view": lambda: Do("write_a_copied_view", write_a_copied_view),
    "view": lambda: Do("view", lambda x: x[:]),
    "identity": nn.Identity,
    "residual": Residual,
    "branch": Branch,
    "frozen": lambda: frozen(linear()),
    "frozen_batch_norm": lambda: frozen(nn.BatchNorm1d(WIDTH)),
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "own_checkpoint": lambda: OwnCheckpoint(0.0),
    "buffer": Average,
    "lstm": Lstm,
    "late_count": lambda: LateCount("count"),
    "late_data": lambda: LateCount("data"),
    "late_replace": lambda: LateCount("replace"),
    "late_none": lambda: LateCount("none"),
    "parameter_count": ParameterCount,
    "hooked": Hooked,
    "own_gradient": OwnGradient,
    "reentrant": Reentrant,
    "transposed": lambda: Do("transposed", lambda x: x.t().contiguous().t()),
    "narrowed": lambda: Do("narrowed", lambda x: torch.cat([x * 1.5, x[:, :2]], 1)[:, :WIDTH]),
    "fourier": lambda: Do("fourier", fourier),
}
# Modules that all layers of a name hold together.
SHARED: dict[str, Callable[[], nn.Module]] = {
    "shared_linear": linear,
    "shared_batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "shared_count": lambda: LateCount("count"),
}
DRAWING: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.3),
    "dropout_": lambda: nn.Dropout(0.3, inplace=True),
    "encoder_with_dropout": lambda: Encoder(0.2),
    "noise": lambda: Do("noise", lambda x: x + torch.rand_like(x)),
    "own_checkpoint_with_dropout": lambda: OwnCheckpoint(0.2),
}
PACKING: dict[str, Callable[[Tensor], Any]] = {
    "twice": lambda x: (x, x),
    "view_and_base": lambda x: (x[:], x),
    "base_and_part": lambda x: (x, x[:, :3]),
    "two_views": lambda x: (x[:, :], x.view_as(x)),
    "list": lambda x: [x, x + 1],
    "singleton": lambda x: (x,),
    "dict": lambda x: {"main": x, "other": x * 2, "note": "word"},
    "nested": lambda x: {"a": [x, None, 3], "b": (x.sigmoid(), {"c": 1.5, "d": x})},
    "point": lambda x: Point(x, 0.5),
    "point_of_points": lambda x: (Point(x, Point(x * 3, "inner")), None),
    "scalar": lambda x: (x, x.mean(), 7),
    "conjugates": lambda x: (x, imaginary(x), imaginary(x).conj()),
    "one_conjugate": lambda x: (lambda z: (x, z, z.conj()))(imaginary(x)),
    "real_part": lambda x: (lambda z: (x, z, z.real))(imaginary(x)),
}


def merge(value: Any) -> Tensor:
    main, *rest = tensors_in(value)
    total = main
    for tensor in rest:
        tensor = tensor.real * tensor.imag if tensor.is_complex() else tensor
        total = total + 0.5 * (tensor if tensor.dim() == 0 else tensor.mean(1, keepdim=True))
    return total
