"""engine=offload: one device and a model that need not fit on it, or into memory at all.

Parameters and what the optimizer keeps live in host memory or in a file, and come to the device slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.balance.solver import solve
from gpipe_cli.engines.protocol import Engine, Objective
from gpipe_cli.engines.sliced import Away, SlicedEngine, kept_bytes, make_tier
from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.cut import parameters_of
from gpipe_cli.offload.pipe import OffloadedPipe
from gpipe_cli.offload.rotation import Rotation
from gpipe_cli.offload.sizing import Demand, border_bytes, layer_bytes
from gpipe_cli.offload.tiers import TIERS
from gpipe_cli.pipeline.layer_logging import register_layer_logging_hooks
from gpipe_cli.profiling.facts import ModelFacts, model_facts
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.schedule.checkpoint import checkpoint_stops
from gpipe_cli.values import parse_bytes

USUAL_SLICES = 8
CHOICES = {"to": TIERS, "by": ("bytes", "time")}


def build(
    module: nn.Sequential,
    objective: Objective,
    *,
    device: torch.device,
    chunks: int,
    eval_chunks: int,
    checkpoint: str,
    deferred_batch_norm: bool,
    step_timeout: float | None,
    log_layers: bool,
    scratch: Path,
    make_sample: Callable[[], Sample],
    value_of: Callable[[Tensor], Tensor] | None = None,
    to: str = "cpu",
    slices: int | None = None,
    by: str = "bytes",
    memory: Any = None,
    prefetch: bool = True,
) -> Engine:
    """scratch: the folder for a file of parameters; value_of: gives the numbers of a parameter built without any."""
    slicing = Slicing(module, objective, chunks, checkpoint, make_sample, to, slices, by, memory, prefetch)
    balance = slicing.balance()
    pipe, away = slicing.apart(
        balance, device, scratch, deferred_batch_norm=deferred_batch_norm, value_of=value_of
    )
    pipe.step_timeout = step_timeout
    if log_layers:
        register_layer_logging_hooks(pipe.partitions)
    return SlicedEngine(
        pipe, module, objective, away, balance=balance, first=device, last=device, eval_chunks=eval_chunks
    )


def _check(*, to: str, by: str, slices: int | None, memory: Any) -> None:
    for key, value in {"to": to, "by": by}.items():
        if value not in CHOICES[key]:
            raise ConfigError(f"engine.{key}={value}: must be one of: {', '.join(CHOICES[key])}")
    if slices is not None and memory is not None:
        raise ConfigError(
            f"engine.memory={memory}: decides how many slices there are; leave engine.slices out"
        )
    if slices is not None and slices < 1:
        raise ConfigError(f"engine.slices={slices}: must be at least 1")
    if memory is not None:
        try:
            parse_bytes(memory)
        except ValueError as error:
            raise ConfigError(f"engine.memory={memory}: {error}") from error


@final
@dataclass(frozen=True)
class Slicing:
    """A model and all that decides into which slices it is cut, and where they are kept."""

    module: nn.Sequential
    objective: Objective
    chunks: int
    checkpoint: str
    make_sample: Callable[[], Sample]
    to: str = "cpu"
    slices: int | None = None
    by: str = "bytes"
    memory: Any = None
    prefetch: bool = True

    def __post_init__(self) -> None:
        _check(to=self.to, by=self.by, slices=self.slices, memory=self.memory)

    @property
    def _rooms(self) -> int:
        return 2 if self.prefetch else 1

    @property
    def _recomputed(self) -> int:
        """Micro-batches of every slice."""
        return checkpoint_stops(self.checkpoint, 1, self.chunks)[0]

    def balance(self) -> list[int]:
        """Layers per slice."""
        if self.memory is not None:
            return self._within(parse_bytes(self.memory))
        layers = len(self.module)
        if self.slices is not None and self.slices > layers:
            raise ConfigError(
                f"engine.slices={self.slices}: the model has only {layers} layers; give at most that many"
            )
        return solve(self._costs(), self.slices or min(USUAL_SLICES, layers)).balance

    def apart(
        self,
        balance: Sequence[int],
        device: torch.device,
        scratch: Path,
        *,
        deferred_batch_norm: bool = False,
        value_of: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[OffloadedPipe, Away]:
        """Take the model away, and give what runs it from there."""
        module = self.module
        borders = partial(border_bytes, module, balance, [self._recomputed] * len(balance), self.make_sample)
        tier = make_tier(self.to, device, scratch, module, self.objective, borders)
        parameters = parameters_of(module, balance)
        parameters.keep_shared([device], value_of)
        slices = parameters.on(tier, value_of)
        rotation = Rotation(slices, tier, device, rooms=self._rooms, beside=self.prefetch)
        pipe = OffloadedPipe(
            module,
            balance,
            devices=[device],
            stores=[rotation],
            chunks=self.chunks,
            checkpoint=self.checkpoint,
            deferred_batch_norm=deferred_batch_norm,
        )
        return pipe, Away(tier, [rotation], list(parameters.shared))

    def _within(self, memory: int) -> list[int]:
        demand = Demand(
            layer_bytes(self.module),
            kept_bytes(self.module, self.objective),
            self._facts(),
            self._rooms,
            self.chunks - self._recomputed,
        )
        return demand.slices(self._costs(), memory)

    def _costs(self) -> list[float]:
        """By time the operations of each layer, counted: to measure them the model would have to be in memory."""
        if self.by == "bytes":
            return list(map(float, layer_bytes(self.module)))
        return [float(one.forward + one.backward) for one in self._facts().flops]

    def _facts(self) -> ModelFacts:
        return model_facts(self.module, self.make_sample(), count_flops=self.by == "time")
