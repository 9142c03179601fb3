"""A random pipe by its seed: which layers, how they are cut and run, and how the pipe is called."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.schedule.action import MODES
from gpipe_cli.skip.tracker import DictionarySkipTracker, use_skip_tracker
from tests.random_pipes.layers import (
    DRAWING,
    PACKING,
    PLAIN,
    SHARED,
    WIDTH,
    Do,
    Holder,
    LateGradient,
    Main,
    Pop,
    Stash,
    compiled,
    merge,
    tensors_in,
    write_last,
)

Call = Literal["step", "backward", "backward_twice", "two_forwards", "forward"]
CALLS: tuple[Call, ...] = (
    "step",
    "step",
    "backward",
    "backward_twice",
    "two_forwards",
    "forward",
)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
STEP_TIMEOUT = 30
"""Seconds; a pipe that takes longer hangs."""


@dataclass(frozen=True)
class RandomPipe:
    seed: int
    layers: tuple[str, ...]
    tied: bool
    balance: tuple[int, ...]
    chunks: int
    rows: int
    checkpoint: str | tuple[str, ...]
    schedule: str
    call: Call
    input: Literal["tensor", "tuple", "dict"]
    input_grad: Literal["none", "leaf", "computed"]
    training: bool
    grad_mode: Literal["grad", "no_grad", "inference"]
    autocast: bool
    has_grad: bool
    """Whether parameters have a gradient already."""
    hooked: bool
    """Whether hooks clip the gradients of parameters, each micro-batch's on its own; in a step only."""
    loss: Literal["function", "module", "closure", "sum"]
    dtype: torch.dtype

    @property
    def uses_twice(self) -> bool:
        """Whether layers share parameters, whose gradients a pipe adds up layer by layer."""
        return self.tied or any(self.layers.count(name) > 1 for name in SHARED)

    @property
    def shares_state(self) -> bool:
        """Whether layers share a module that its forward changes."""
        return any(self.layers.count(name) > 1 for name in ("shared_batch_norm", "shared_count"))

    @property
    def draws(self) -> bool:
        return any(name in DRAWING for name in self.layers)

    def model(self, *, plain: bool = True) -> nn.Sequential:
        """The same model on every call. plain: without a pipe as one of its layers."""
        torch.manual_seed(self.seed)
        packed = self.input != "tensor"
        children: list[nn.Module] = []
        shared = {name: make() for name, make in SHARED.items() if name in self.layers}
        for name in self.layers:
            if name == "nested_pipe":
                inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
                layer = inner if plain else GPipe(inner, [1, 1], devices=["cpu", "cpu"], checkpoint="always")
            else:
                layer = Holder(shared[name]) if name in shared else _layer(name)
            on_main = name in PLAIN | DRAWING | SHARED or name == "nested_pipe"
            children.append(Main(layer) if packed and on_main else layer)
            packed = name in PACKING or name == "late_gradient" or (packed and name != "merge")
        model = nn.Sequential(*children)
        linears = [
            layer
            for layer in model.modules()
            if type(layer) is nn.Linear and layer.weight.shape == (WIDTH, WIDTH)
        ]
        if self.tied and len(linears) > 1:
            linears[-1].weight = linears[0].weight
        model = model.to(self.dtype).train(self.training)
        if self.hooked:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05) * 2)
        return model

    def pipe(self, *, whole: bool, devices: Sequence[torch.device] = ()) -> GPipe:
        """The pipe, or the same one in a single partition; by default on the CPU."""
        model = self.model(plain=False)
        if whole:
            pipe = GPipe(model, [len(model)], devices=["cpu"], chunks=self.chunks, checkpoint="never")
        else:
            workers = min(2, len(self.balance)) if self.schedule == "interleaved" else len(self.balance)
            pipe = GPipe(
                model,
                self.balance,
                devices=[devices[index % len(devices)] if devices else "cpu" for index in range(workers)],
                chunks=self.chunks,
                checkpoint=self.checkpoint,
                schedule=self.schedule,
            )
        pipe.step_timeout = STEP_TIMEOUT
        return pipe.train(self.training)

    def value(self, round: int) -> Any:
        """The input of one call, without grad."""
        generator = torch.Generator().manual_seed(1000 * self.seed + round)
        first, second = torch.randn(2, self.rows, WIDTH, dtype=self.dtype, generator=generator)
        forms = {"tensor": first, "tuple": (first, second), "dict": {"x": first, "y": second}}
        return forms[self.input]

    def target(self, round: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + round + 500)
        return torch.randn(self.rows, WIDTH, dtype=self.dtype, generator=generator)


def _layer(name: str) -> nn.Module:
    if name in PACKING:
        return Do(name, PACKING[name])
    if name.startswith("compiled_"):
        return compiled(name.removeprefix("compiled_"))
    special = {
        "merge": lambda: Do("merge", merge),
        "stash": lambda: Stash(False),
        "stash_copy": lambda: Stash(True),
        "late_gradient": LateGradient,
        "write_last": lambda: Do("write_last", write_last),
    }
    return {**PLAIN, **DRAWING, **special, "pop": Pop}[name]()


def random_pipe(seed: int) -> RandomPipe:
    draw = random.Random(seed)
    input = draw.choices(["tensor", "tuple", "dict"], [8, 1, 1])[0]
    layers = _layers(
        draw,
        packed=input != "tensor",
        names=[*PLAIN, "nested_pipe", *(DRAWING if draw.random() < 0.3 else [])],
    )
    plain = [place for place, name in enumerate(layers) if name in PLAIN]
    if len(plain) > 1 and draw.random() < 0.2:
        name = draw.choice(list(SHARED))
        for place in draw.sample(plain, 2):
            layers[place] = name
    if seed % 50 == 7:  # compilation is slow
        input, layers = "tensor", [f"compiled_{draw.choice(['eager', 'aot_eager'])}", "linear", "leaky_relu_"]
    cuts = sorted(draw.sample(range(1, len(layers)), draw.randint(0, min(3, len(layers) - 1))))
    balance = tuple(end - begin for begin, end in itertools.pairwise([0, *cuts, len(layers)]))
    call: Call = draw.choice(CALLS)
    autocast = draw.random() < 0.15
    case = RandomPipe(
        seed=seed,
        layers=tuple(layers),
        tied=draw.random() < 0.2,
        balance=balance,
        chunks=draw.randint(1, 5),
        rows=draw.choice([1, 2, 3, 4, 6, 7, 9]),
        checkpoint=draw.choice([*MODES, "always", tuple(draw.choices(MODES, k=len(balance)))]),
        schedule=draw.choice(SCHEDULES),
        call=call,
        input=input,
        input_grad=draw.choice(["none", "leaf", "computed"]),
        training=draw.random() < 0.75,
        grad_mode=draw.choice(["no_grad", "inference"]) if call == "forward" else "grad",
        autocast=autocast,
        has_grad=draw.random() < 0.3,
        hooked=draw.random() < 0.2 and call == "step",
        loss=draw.choice(["function", "module", "closure", "sum"]) if call == "step" else "function",
        # No layer multiplies bfloat16 with float64.
        dtype=torch.float32 if autocast else draw.choice([torch.float32, torch.float32, torch.float64]),
    )
    return replace(case, input_grad="none") if writes_its_input(case) else case


def _layers(draw: random.Random, *, packed: bool, names: list[str]) -> list[str]:
    """Names of layers that fit behind one another, at most one skip among them."""
    layers: list[str] = []
    for _ in range(draw.randint(2, 7)):
        kind = draw.random()
        stashed, popped = any(name.startswith("stash") for name in layers), "pop" in layers
        if kind < 0.15:
            packing = draw.choice([*PACKING, "late_gradient"])
            layers.append("merge" if packed else packing)
            packed = not packed
        elif kind < 0.2 and packed:
            layers.append("write_last")
        elif kind < 0.3 and not popped:
            layers.append("pop" if stashed else draw.choice(["stash", "stash_copy"]))
        else:
            layers.append(draw.choice(names))
    if any(name.startswith("stash") for name in layers) and "pop" not in layers:
        layers.append("pop")
    # The tensors of a "scalar" have no rows to be joined.
    return [*layers, "merge"] if packed and "scalar" in layers else layers


def writes_its_input(case: RandomPipe) -> bool:
    """Plain autograd refuses to write a leaf that requires grad, so such an input is given without."""
    value = case.value(0)
    # Batch norm refuses a single row; so it will when the pipe is called.
    with torch.no_grad(), use_skip_tracker(DictionarySkipTracker()), contextlib.suppress(ValueError):
        case.model()(value)
    return any(tensor._version > 0 for tensor in tensors_in(value))
