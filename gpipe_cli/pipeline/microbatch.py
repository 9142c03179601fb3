"""Mini-batches into micro-batches and back.

`MiniBatch` splits every tensor of its input on dimension 0, except those marked `NoChunk`; other values go to every
micro-batch as they are. `gather` joins the outputs of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from gpipe_cli.pipeline.context import CallerState, MicroBatch
from gpipe_cli.pipeline.layer import draw_key
from gpipe_cli.pytree import SINGLE, Template, element, flatten, flatten_with, map_tensors, paths

Value: TypeAlias = Any
"""A value that passes from layer to layer: see `pytree`."""


@final
class NoChunk:
    """Marks an input tensor that every micro-batch receives whole, such as a mask without a batch dimension."""

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"NoChunk takes a Tensor, but got {type(tensor).__name__}")
        self.tensor = tensor


@final
class Batch:
    """A value to split: its tensors, the template that builds it, and the tensors that are not split."""

    __slots__ = ("rows", "template", "tensors", "whole")

    def __init__(self, value: Any, what: str) -> None:
        self.tensors, self.template, self.whole = _parts(value, what)
        self.rows = self._count_rows(what, type(value).__name__)

    def _count_rows(self, what: str, kind: str) -> int:
        rows: int | None = None
        for place, tensor in enumerate(self.tensors):
            if tensor.layout is not torch.strided or tensor.is_nested:
                raise TypeError(
                    f"{self._element(what, place)} has layout {tensor.layout} or is nested, and cannot be split into "
                    "micro-batches. Pass a dense tensor"
                )
            if place in self.whole:
                continue
            if tensor.dim() == 0:
                raise TypeError(
                    f"{self._element(what, place)} cannot be split into micro-batches: it is a tensor without "
                    "dimensions. Pass NoChunk(tensor) if every micro-batch is to get it whole"
                )
            if rows is not None and tensor.size(0) != rows:
                raise TypeError(
                    f"{self._element(what, place)} cannot be split into micro-batches: it has {tensor.size(0)} rows "
                    f"where others have {rows}, and tensors must agree on the batch size. Pass NoChunk(tensor) if "
                    "every micro-batch is to get it whole"
                )
            rows = tensor.size(0)
        if rows is None:
            raise TypeError(
                f"expected Tensor, but got {kind} as {what}, which holds none to split into micro-batches"
            )
        return rows

    def _element(self, what: str, place: int) -> str:
        return element(what, next(path for at, path in paths(self.template) if at == place))

    def scatter(self, count: int) -> list[tuple[Tensor, ...]]:
        """The tensors of each micro-batch, of the sizes that `micro_batches` gives; no row is lost, none is copied."""
        if count == 1:
            return [self.tensors]
        columns = [
            [tensor] * count if place in self.whole else tensor.tensor_split(count)
            for place, tensor in enumerate(self.tensors)
        ]
        return list(zip(*columns, strict=True))


def _parts(value: Any, what: str) -> tuple[tuple[Tensor, ...], Template, frozenset[int]]:
    if isinstance(value, Tensor):
        return (value,), SINGLE, frozenset()
    whole: dict[int, Tensor] = {}

    def tensor_of(member: Any) -> Tensor | None:
        if isinstance(member, NoChunk):
            whole[id(member.tensor)] = member.tensor
            return member.tensor
        return member if isinstance(member, Tensor) else None

    tensors, template = flatten_with(value, what, tensor_of)
    return tensors, template, frozenset(place for place, tensor in enumerate(tensors) if id(tensor) in whole)


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """The distinct tensors of a value."""
    return flatten(value, "value")[0]


def moved(value: Value, device: torch.device) -> Value:
    return map_tensors(lambda tensor: tensor.to(device), value)


def micro_batches(rows: int, chunks: int, least_rows: int = 1) -> tuple[MicroBatch, ...]:
    """At most `chunks` micro-batches whose sizes differ by at most one; one empty one for an empty batch.

    A batch that is too small for `chunks` micro-batches of `least_rows` rows is split into fewer.
    """
    count = max(1, min(rows // least_rows, chunks))
    small, larger = divmod(rows, count)
    return tuple(MicroBatch(index, small + (index < larger)) for index in range(count))


@final
@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One call of a pipe: the input, its micro-batches, and the caller's state."""

    key: int
    rows: int
    micro_batches: tuple[MicroBatch, ...]
    tensors: tuple[Tensor, ...]
    """The tensors of the input."""
    inputs: list[tuple[Tensor, ...]]
    """The tensors of each micro-batch."""
    template: Template
    """Builds the value that enters the first layer."""
    whole: frozenset[int]
    """Places of the tensors that every micro-batch receives whole."""
    state: CallerState

    @classmethod
    def of(cls, input: Value, chunks: int, key: int | None, least_rows: int = 1) -> MiniBatch:
        batch = Batch(input, "input")
        pieces = micro_batches(batch.rows, chunks, least_rows)
        return cls(
            key=draw_key() if key is None else key,
            rows=batch.rows,
            micro_batches=pieces,
            tensors=batch.tensors,
            inputs=batch.scatter(len(pieces)),
            template=batch.template,
            whole=batch.whole,
            state=CallerState.capture(),
        )


def gather(parts: Sequence[tuple[Sequence[Tensor], Template]]) -> tuple[tuple[Tensor, ...], Template]:
    """Join the outputs of all micro-batches, each given as tensors and template."""
    tensors, template = parts[0]
    if len(parts) == 1:
        return tuple(tensors), template
    if any(other != template for _, other in parts):
        raise TypeError(
            f"cannot join the outputs of {len(parts)} micro-batches: they differ in their containers or in the plain "
            "values beside their tensors"
        )
    return tuple(_join(column) for column in zip(*(tensors for tensors, _ in parts), strict=True)), template


def _join(column: tuple[Tensor, ...]) -> Tensor:
    if column[0].dim() == 0:
        raise RuntimeError(
            f"cannot concatenate the outputs of {len(column)} micro-batches: they have no batch dimension. "
            "Return one row per sample, or let pipe.step(input, target, loss_fn) compute the loss."
        )
    return torch.cat(column)
