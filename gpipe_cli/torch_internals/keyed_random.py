"""Random ops that draw from a generator of ours: a thread-local dispatch mode.

Decides how each op tagged `nondeterministic_seeded` is given the generator: by its argument, by another
overload that has one, or by an equal of our own; an op with none of these is refused. Uses
`torch.utils._python_dispatch`, `torch._ops` and `torch._compile`, which torch keeps private. Knows nothing of
layers or of where seeds come from.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_cli.errors import GpipeError

__all__ = ["KeyedRandom", "UnkeyedRandomError"]

# How an op is run: with its arguments and a function that gives the generator for a device.
GeneratorFor = Callable[[torch.device], torch.Generator]
Runner = Callable[[tuple[Any, ...], dict[str, Any], GeneratorFor], Any]


@final
class UnkeyedRandomError(GpipeError):
    """A random op that cannot draw from a key."""


@final
class KeyedRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, random ops of this thread draw from generators seeded by the last `reseed`.

    One object serves one thread at a time; its generators are made once per device and seeded at the first
    draw, so entering it for code that draws nothing costs no seeding.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seeded: set[torch.device] = set()
        self._drew_in_checkpoint = False

    def __reduce__(self) -> tuple[type[KeyedRandom], tuple[()]]:
        # Generators are made when needed and always seeded first: there is nothing to copy.
        return KeyedRandom, ()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would hide the dispatch below from its compiler, and import the whole compiler for that: two
        # seconds and 80 MiB at the first step of every process, most of which compile nothing. See `reseed`.
        return False

    def reseed(self, seed: int) -> KeyedRandom:
        if not hasattr(KeyedRandom.__torch_dispatch__, "__wrapped__") and "torch._dynamo" in sys.modules:
            # Somebody does compile: now the dispatch must be hidden, or it would be compiled into layers.
            KeyedRandom.__torch_dispatch__ = _disable_dynamo(KeyedRandom.__torch_dispatch__)  # type: ignore[method-assign]
        self._seed = seed
        self._seeded.clear()
        self._drew_in_checkpoint = False
        return self

    def refuse_in_checkpoint(self) -> None:
        """Raise if something drew inside `torch.utils.checkpoint` since the last `reseed`.

        It repeats a forward by restoring the default generators, which nothing here draws from: the second
        mask would be another one, and nobody would notice.
        """
        if self._drew_in_checkpoint:
            raise UnkeyedRandomError(
                "a layer draws random numbers inside torch.utils.checkpoint, which cannot draw the same for "
                "backward. Use the pipe's own checkpoint= instead"
            )

    @property
    def drew(self) -> bool:
        """Whether any op drew since the last `reseed`."""
        return bool(self._seeded)

    def _generator(self, device: torch.device) -> torch.Generator:
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        if device not in self._seeded:
            generator.manual_seed(self._seed)
            self._seeded.add(device)
            self._drew_in_checkpoint |= _inside_checkpoint()
        return generator

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        runner = _runner(func) if isinstance(func, OpOverload) else None
        if runner is None:
            return func(*args, **(kwargs or {}))
        return runner(args, kwargs or {}, self._generator)


def _inside_checkpoint() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


@functools.cache
def _runner(op: OpOverload) -> Runner | None:
    """How to run `op` under a key; None for the many that draw nothing."""
    if torch.Tag.nondeterministic_seeded not in op.tags or op in _CHOOSE_ONLY:
        return None
    if op in _OWN:
        return _OWN[op]
    target = _with_generator(op)
    return functools.partial(_refuse, op) if target is None else functools.partial(_run_keyed, op, target)


def _with_generator(op: OpOverload) -> OpOverload | None:
    """The overload of the same op that takes a generator and otherwise the same arguments."""
    wanted = [argument.name for argument in op._schema.arguments if argument.name != "generator"]
    packet = op.overloadpacket
    overloads: list[OpOverload] = [op, *(getattr(packet, name) for name in packet.overloads())]
    for overload in overloads:
        names = [argument.name for argument in overload._schema.arguments]
        if "generator" in names and [name for name in names if name != "generator"] == wanted:
            return overload
    return None


def _run_keyed(
    op: OpOverload,
    target: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    generator_for: GeneratorFor,
) -> Any:
    named = _named_arguments(op, args, kwargs)
    if named.get("generator") is not None:
        raise UnkeyedRandomError(
            f"{op} was given a generator of its own inside a layer; a pipe keys all randomness by (step, "
            "layer, micro-batch), which such a draw would escape. Call it without `generator`"
        )
    named["generator"] = generator_for(_device_of(named))
    return target(**named)


def _refuse(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], generator_for: GeneratorFor
) -> Any:
    # What equals its default is left out of a dispatched call.
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    named = defaults | _named_arguments(op, args, kwargs)
    # Attention and recurrent kernels carry the tag for their dropout; without it they draw nothing.
    probability = named.get("dropout_p", named.get("dropout"))
    if probability == 0 or named.get("train") is False:
        return op(*args, **kwargs)
    raise UnkeyedRandomError(
        f"{op} draws random numbers but takes no generator, so it cannot be keyed by (step, layer, "
        "micro-batch). Use an op that does, such as nn.Dropout, or set its dropout to 0"
    )


def _native_dropout(args: tuple[Any, ...], kwargs: dict[str, Any], generator_for: GeneratorFor) -> Any:
    """The fused dropout of CUDA takes no generator: the same function from ops that do."""
    named = _named_arguments(torch.ops.aten.native_dropout.default, args, kwargs)
    input, probability, train = named["input"], named["p"], named.get("train")
    if train is False or probability == 0:
        return torch.ops.aten.native_dropout.default(input, 0.0, train)
    mask = torch.empty_like(input, dtype=torch.bool)
    mask.bernoulli_(1 - probability, generator=generator_for(input.device))
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    return input * mask * scale, mask


def _named_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in op._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _device_of(named: dict[str, Any]) -> torch.device:
    for value in named.values():
        if isinstance(value, Tensor):
            return value.device
    device = named.get("device")
    return torch.get_default_device() if device is None else torch.device(device)


# Only asks which attention kernel fits; the kernel chosen is dispatched, and judged, on its own.
_CHOOSE_ONLY = frozenset({torch.ops.aten._fused_sdp_choice.default})
_OWN: dict[OpOverload, Runner] = {torch.ops.aten.native_dropout.default: _native_dropout}
