"""Updates parameters that are stored in bfloat16 or float16, so that small updates are not rounded away.

The last bit of a bfloat16 number is 1/128 to 1/256 of it. An update that is smaller than half of that changes nothing
when it is rounded to nearest, and in fine-tuning most are. So the update is computed in float32, and either a float32
copy of each parameter keeps what the parameter cannot (`master`), or the result is rounded up or down at random, with
the probabilities that make it right on average (`stochastic`). For bfloat16 the second needs no more memory than
parameters and state in half precision, because the state is rounded in the same way. The state of float16 parameters
stays in float32: the squares of gradients are too small for float16.

The random bits come from the step and the name of the parameter. So they do not depend on who updates it, and with
what other parameters.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError

Item = TypeVar("Item")
NEAREST: Final = "nearest"
ROUNDINGS: Final = ("stochastic", NEAREST)
RANDOM_KEY: Final = "random_key"
"""A setting of each parameter group: what the random bits of the next step depend on."""
GRADIENT_SCALE: Final = "gradient_scale"
"""A setting of each parameter group: the loss scale, which float16 gradients still have."""
MASTER: Final = "master"
"""The entry of an optimizer's state with the parameter in float32."""
_HALF = (torch.bfloat16, torch.float16)
_CHUNK_BYTES = 64 * 2**20
"""How many bytes of parameters are in memory in float32 at once; at least one parameter."""
_SAMPLED = 4096
"""How many elements of a parameter are looked at to count lost updates."""
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""How many bits of a float32 number the dtype does not have."""
_SMALLEST_NORMAL = 2.0**-14
_FLOAT16_SPACING = 2.0**-24
"""The distance between float16 numbers below the smallest normal one."""


def is_half(parameter: Tensor) -> bool:
    return parameter.dtype in _HALF


def optimizer_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class that computes the updates."""
    return type(optimizer._inner if isinstance(optimizer, HalfPrecisionOptimizer) else optimizer)


@final
class HalfPrecisionOptimizer(torch.optim.Optimizer):
    """Has the parameters, groups and state of another optimizer, and lets it compute in float32."""

    def __init__(
        self, inner: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], *, master: bool
    ) -> None:
        """master: keep each parameter in float32 too; otherwise round stochastically."""
        super().__init__(inner.param_groups, inner.defaults)
        self._inner, self._names, self._has_master = inner, names, master
        for group in self.param_groups:
            group.update({RANDOM_KEY: 0, GRADIENT_SCALE: 1.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients, a chunk of them at a time."""
        assert closure is None, "the pipeline computes the gradients once per step"
        updated = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        others = [each for each in updated if not is_half(each)]
        if others:
            self._step_inner({each: each for each in others}, self.state)
        half = [each for each in updated if is_half(each)]
        for chunk in in_chunks(half, lambda each: 4 * each.numel(), _CHUNK_BYTES):
            self._step_chunk(chunk)

    def _step_chunk(self, chunk: list[nn.Parameter]) -> None:
        precise: dict[nn.Parameter, nn.Parameter] = {}
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for parameter in chunk:
            own = self.state[parameter]
            master = own.get(MASTER)
            copy = nn.Parameter(parameter.float() if master is None else master)
            assert parameter.grad is not None, "only parameters with gradients are updated"
            copy.grad = parameter.grad.float()
            if parameter.dtype == torch.float16:
                copy.grad.div_(self.param_groups[0][GRADIENT_SCALE])
            precise[parameter] = copy
            state[copy] = {
                key: value.float() if isinstance(value, Tensor) and is_half(value) else value
                for key, value in own.items()
                if key != MASTER
            }
        self._step_inner(precise, state)
        for parameter, copy in precise.items():
            self._keep(parameter, copy, state[copy])

    def _step_inner(
        self, precise: Mapping[nn.Parameter, nn.Parameter], state: defaultdict[Any, dict[str, Any]]
    ) -> None:
        """Let the other optimizer update what stands for some of the parameters."""
        self._inner.param_groups = [
            {**group, "params": [precise[each] for each in group["params"] if each in precise]}
            for group in self.param_groups
        ]
        self._inner.state = state
        self._inner.step()
        for group, own in zip(self.param_groups, self._inner.param_groups, strict=True):
            changed = [key for key, value in own.items() if key != "params" and value is not group.get(key)]
            if changed and any(own[key] != group.get(key) for key in changed):
                raise ConfigError(
                    f"optimizer: {type(self._inner).__name__} changes its own {changed[0]} in each step, which the "
                    "update of parameters in half precision cannot follow; keep them in float32, and set "
                    "precision=bf16 instead"
                )

    def _keep(self, parameter: nn.Parameter, copy: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Store the new values of a parameter and of its state."""
        own = self.state[parameter]
        if self._has_master:
            own.update(state)
            own.setdefault(MASTER, copy.detach())
            parameter.copy_(copy)
            return
        generator = self._generator(parameter)
        parameter.copy_(round_stochastically(copy.detach(), parameter.dtype, generator))
        for key, value in state.items():
            if not _is_rounded(value, parameter.dtype):
                own[key] = value
                continue
            # In place, because the memory may belong to a buffer that slices take turns in.
            stored = own.get(key)
            if not isinstance(stored, Tensor):
                stored = own[key] = torch.empty_like(value, dtype=parameter.dtype)
            stored.copy_(round_stochastically(value, stored.dtype, generator))

    def _generator(self, parameter: nn.Parameter) -> torch.Generator:
        """Seeded by the step and the name of the parameter."""
        text = f"{self.param_groups[0][RANDOM_KEY]} {self._names[parameter]}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator(parameter.device).manual_seed(int.from_bytes(digest, "little") >> 1)


@final
class LostUpdates:
    """Counts how many updates of parameters in half precision change nothing, in a sample of a part of a step."""

    def __init__(self) -> None:
        self._lost = self._all = 0

    @property
    def share(self) -> float | None:
        return self._lost / self._all if self._all else None

    @contextmanager
    def counted(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Count the updates that the optimizer makes in the block."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        before = {
            each: _sample(each).clone() for each in parameters if is_half(each) and each.grad is not None
        }
        yield
        for parameter, values in before.items():
            assert parameter.grad is not None, "an update changes no gradient"
            has_gradient = _sample(parameter.grad) != 0
            self._all += int(has_gradient.sum())
            self._lost += int((has_gradient & (_sample(parameter) == values)).sum())


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[:_SAMPLED]


def _is_rounded(value: Any, dtype: torch.dtype) -> bool:
    """Whether this entry of the state of a parameter is stored in the parameter's dtype."""
    is_tensor = isinstance(value, Tensor) and value.dtype == torch.float32
    return is_tensor and value.dim() > 0 and dtype == torch.bfloat16  # a single number is a count of steps


def round_stochastically(value: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """float32 numbers that the dtype can represent: each is the next below or above, and right on average."""
    bits = _DROPPED_BITS[dtype]
    random = torch.randint(
        0, 1 << bits, value.shape, dtype=torch.int32, device=value.device, generator=generator
    )
    # The numbers between two neighbours of the dtype differ in the dropped bits alone, and are as far apart as these
    # bits tell. Adding random ones carries into the others with the right probability, but must not turn nan into zero.
    rounded = (value.contiguous().view(torch.int32) + random).bitwise_and_(-(1 << bits)).view(torch.float32)
    rounded = rounded.where(value.isfinite(), value)
    if dtype == torch.bfloat16:
        return rounded
    share = random.float().div_(1 << bits)
    subnormal = (value / _FLOAT16_SPACING + share).floor_() * _FLOAT16_SPACING
    return torch.where(value.abs() < _SMALLEST_NORMAL, subnormal, rounded)


def in_chunks(items: Iterable[Item], size_of: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Consecutive items of at most `limit` bytes together, or a larger one alone."""
    chunk: list[Item] = []
    size = 0
    for item in items:
        if chunk and size + size_of(item) > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += size_of(item)
    if chunk:
        yield chunk
