"""What an engine exchanges with the processes that work on the same step: the other ranks of its pipe, and replicas.

A process alone gets back what it gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import final

import torch
from torch import Tensor, distributed, nn

from gpipe_cli.distributed.groups import RankCoords
from gpipe_cli.distributed.replica_assignment import assign_replicas
from gpipe_cli.distributed.world import (
    broadcast_json,
    broadcast_numbers,
    broadcast_tensor,
    gather_numbers,
    sum_of_numbers,
)
from gpipe_cli.engines.protocol import BatchResult
from gpipe_cli.engines.state import EngineState, parameter_of
from gpipe_cli.torch_internals.gradients import agree_on_overflow

_NO_LAYER = 1e18
"""Larger than any layer index, and exact in a double."""
NonfiniteOutput = tuple[int, int]
"""A layer index and a micro-batch index."""


@final
class Collectives:
    """Facts come from the rank with the last layer. No tensor of the model's size leaves its process.

    Norms keep the order of the model's names, with a tied parameter counted once, by the rank that owns it.
    """

    def __init__(
        self,
        coords: RankCoords,
        module: nn.Sequential,
        rank_of_layer: Sequence[int],
        *,
        sharded: bool = False,
    ) -> None:
        """sharded: whether each replica has the state of the optimizer for a share of the parameters only."""
        self._coords = coords
        self._sharded = sharded
        self._module = module
        self._names = [name for name, _ in module.named_parameters()]
        holders = _holders(module, rank_of_layer)
        # Ranks hold different numbers of parameters, and all_gather wants rows of one length.
        self._row_length = max(sum(rank in ranks for ranks in holders) for rank in range(coords.ranks))
        self._norm_positions = self._positions(holders)
        owned = self._owned_names(rank_of_layer)
        self._owned, self._saved = frozenset(chain(*owned)), frozenset(self._saved_names(owned))
        self._sum_names: list[str] | None = None

    @classmethod
    def alone(cls, module: nn.Sequential, device: torch.device) -> Collectives:
        """Those of a process that has the whole model."""
        coords = RankCoords(None, None, device, workers=(0,), rank=0, ranks=1, replica=0, replicas=1)
        return cls(coords, module, [0] * len(module))

    def fraction_of(self, weight: float) -> float:
        """The fraction that `weight` is of the weights of all replicas."""
        if self._coords.replicas == 1:
            return 1.0
        (total,) = sum_of_numbers(torch.tensor([weight], dtype=torch.float64), self._coords.data)
        return weight / float(total) if total else 0.0

    def result(self, own: BatchResult | None, *, measured: bool) -> BatchResult:
        """Facts summed over all replicas; `own` is None in a process without the last layer or without samples.

        measured: whether facts have sums; every process gives the same.
        """
        names = self._shared_names(own) if measured else []
        numbers = self._of_replicas(own, names)
        return _as_result(broadcast_numbers(numbers, self._coords.last_rank, self._coords.pipe), names)

    def result_and_norms(
        self, own: BatchResult | None, norms: Tensor, *, measured: bool
    ) -> tuple[BatchResult, Tensor]:
        """Facts, and the norms of all gradients in the order of the model's names, from those of this process.

        A norm of -1 stands for no gradient.
        """
        names = self._shared_names(own) if measured else []
        numbers = self._of_replicas(own, names)
        # Both at once: for small layers, a second collective is a noticeable part of the step. Gathered, not reduced: a
        # sum over ranks would add norms in an order that depends on the partitioning.
        padding = norms.new_zeros(self._row_length - len(norms))
        rows = gather_numbers(torch.cat([numbers, norms, padding]), self._coords.pipe)
        # `_norm_positions` leaves the padding out.
        all_norms = rows[:, len(numbers) :].flatten()[self._norm_positions]
        return _as_result(rows[self._coords.last_rank, : len(numbers)], names), all_norms

    def _of_replicas(self, own: BatchResult | None, names: Sequence[str]) -> Tensor:
        """In the last rank of each pipe the facts as numbers, summed over the replicas; zeros in the others."""
        values = [0.0] * (3 + len(names))
        if own is not None:
            values = [own.loss, own.samples, own.weight, *(own.sums[name] for name in names)]
        numbers = torch.tensor(values, dtype=torch.float64)
        if self._coords.has_output and self._coords.replicas > 1:
            return sum_of_numbers(numbers, self._coords.data)
        return numbers

    def _shared_names(self, own: BatchResult | None) -> list[str]:
        coords = self._coords
        if own is not None and coords.pipe is None:
            return list(own.sums)
        # Once per run, because the names never change and sharing them takes two broadcasts.
        if self._sum_names is None:
            # In the last rank of the first replica if in any: a short batch leaves later replicas without samples.
            names = list(own.sums) if own is not None else []
            if coords.has_output and coords.replicas > 1:
                names = broadcast_json(names, 0, coords.data)
            self._sum_names = list(broadcast_json(names, coords.last_rank, coords.pipe))
        return self._sum_names

    def from_last_rank(self, tensor: Tensor | None) -> Tensor:
        """The tensor of the process with the last layer, on the CPU; the others pass None."""
        return broadcast_tensor(tensor, self._coords.last_rank, self._coords.pipe)

    def agree_on_overflow(self, scaler: torch.amp.GradScaler) -> bool:
        """Whether the gradients of a process overflowed, so that every process must skip the update."""

        # Replicas have equal gradients by now, so it is enough to ask the ranks of this pipe.
        def largest(own: Tensor) -> Tensor:
            if self._coords.pipe is not None:
                distributed.all_reduce(own, distributed.ReduceOp.MAX, group=self._coords.pipe)
            return own

        return agree_on_overflow(scaler, self._coords.device, largest)

    def first_nonfinite_output(self, own: NonfiniteOutput | None) -> NonfiniteOutput | None:
        """The first over all processes."""
        numbers = torch.tensor(own or (_NO_LAYER, _NO_LAYER), dtype=torch.float64)
        for group in (self._coords.pipe, self._coords.data):
            rows = gather_numbers(numbers, group)
            numbers = torch.tensor(min(rows.tolist()), dtype=torch.float64)
        layer, micro_batch = numbers.tolist()
        return None if layer == _NO_LAYER else (int(layer), int(micro_batch))

    def last_parameter_name(self, names: Sequence[str]) -> str | None:
        """The last parameter name over all processes, in the order of the model's names."""
        own = self._names.index(names[-1]) if names else -1
        rows = gather_numbers(torch.tensor([own]), self._coords.pipe)
        last = int(rows.max())
        return None if last < 0 else self._names[last]

    def peak_bytes(self, own: list[int | None]) -> list[int | None]:
        """The peaks of the devices of all processes of a pipe, from those of this process."""
        rows = gather_numbers(torch.tensor([-1 if peak is None else peak for peak in own]), self._coords.pipe)
        return [None if peak < 0 else int(peak) for peak in rows.flatten().tolist()]

    def saved_part(self, own: EngineState) -> EngineState:
        """The part of this process's state that it saves: each tensor is saved by one process."""
        # Sharded, a replica has the state of the optimizer for its own share only, which need not be that of saving.
        with_state = self._owned if self._sharded else self._saved
        return replace(
            own,
            model={name: tensor for name, tensor in own.model.items() if name in self._saved},
            buffers={name: tensor for name, tensor in own.buffers.items() if name in self._saved},
            optimizer={
                path: tensor for path, tensor in own.optimizer.items() if parameter_of(path) in with_state
            },
        )

    def _owned_names(self, rank_of_layer: Sequence[int]) -> list[list[str]]:
        """The names of each tensor whose first layer is in this rank of the pipe."""
        owners: dict[Tensor, int] = {}
        for layer, rank in zip(self._module, rank_of_layer, strict=True):
            for tensor in (*layer.parameters(), *layer.buffers()):
                owners.setdefault(tensor, rank)
        names: dict[Tensor, list[str]] = {}
        for name, tensor in self._named_tensors():
            if owners.get(tensor, 0) == self._coords.rank:
                names.setdefault(tensor, []).append(name)
        return list(names.values())

    def _saved_names(self, owned: Sequence[Sequence[str]]) -> Iterator[str]:
        """The share of this replica; the first rank of all also saves what a module adds to its state_dict itself."""
        sizes = {name: tensor.nbytes for name, tensor in self._named_tensors()}
        replicas = assign_replicas([sizes[names[0]] for names in owned], self._coords.replicas)
        for names, replica in zip(owned, replicas, strict=True):
            if replica == self._coords.replica:
                yield from names
        if not self._coords.rank and not self._coords.replica:
            yield from (name for name in self._module.state_dict() if name not in sizes)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._module.named_parameters(remove_duplicate=False)
        yield from self._module.named_buffers(remove_duplicate=False)

    def _positions(self, holders: Sequence[Sequence[int]]) -> Tensor:
        """For each trained parameter the position of its norm among the gathered rows."""
        positions = []
        counts = [0] * self._coords.ranks
        for ranks in holders:
            owner = ranks[0]
            positions.append(owner * self._row_length + counts[owner])
            for rank in set(ranks):
                counts[rank] += 1
        return torch.tensor(positions, dtype=torch.int64)


def _as_result(numbers: Tensor, names: Sequence[str]) -> BatchResult:
    loss, samples, weight, *sums = numbers.tolist()
    return BatchResult(loss, int(samples), dict(zip(names, sums, strict=True)), weight)


def _holders(module: nn.Sequential, rank_of_layer: Sequence[int]) -> list[list[int]]:
    """For each trained parameter, in the order of names, the ranks whose layers use it, layer by layer."""
    users: dict[int, list[int]] = {}
    for layer, rank in zip(module, rank_of_layer, strict=True):
        for parameter in layer.parameters():
            users.setdefault(id(parameter), []).append(rank)
    # What is attached to the sequence itself is in no layer.
    return [users.get(id(parameter), [0]) for parameter in module.parameters() if parameter.requires_grad]
