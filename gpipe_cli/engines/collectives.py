"""What an engine exchanges with the other processes that work on the same step.

`SingleProcess` exchanges nothing. `RankCollectives` talks to the ranks of the same pipe and to the other replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, final

import torch
from torch import Tensor, distributed, nn

from gpipe_cli.distributed.messages import (
    gather_numbers,
    share_json,
    share_numbers,
    share_tensor,
    sum_of_numbers,
)
from gpipe_cli.distributed.peer import Message, Peer
from gpipe_cli.distributed.rank_coords import RankCoords
from gpipe_cli.engines.protocol import StepFacts
from gpipe_cli.engines.state import EngineState, merged_numbers
from gpipe_cli.torch_internals.loss_scale import agree_on_overflow

_NO_LAYER = 1e18
"""Larger than any layer index, and exact in a double."""
NonfiniteOutput = tuple[int, int]
"""A layer index and a micro-batch index."""


class Collectives(Protocol):
    def share_of(self, weight: float) -> float:
        """The fraction that `weight` is of the weights of all replicas."""

    def facts(self, own: StepFacts | None, *, measured: bool) -> StepFacts:
        """Facts summed over all replicas; `own` is None in a process without the last layer or without samples.

        measured: whether facts have sums; every process gives the same.
        """

    def from_last_rank(self, tensor: Tensor | None) -> Tensor:
        """The tensor of the process with the last layer, on the CPU; the others pass None."""

    def norms(self, own: Tensor) -> Tensor:
        """The norms of all gradients in the order of the model's names, from those of this process; -1: no gradient."""

    def agree_on_overflow(self, scaler: torch.amp.GradScaler) -> None:
        """Make every process skip the update if the gradients of one overflowed."""

    def first_nonfinite_output(self, own: NonfiniteOutput | None) -> NonfiniteOutput | None:
        """The first over all processes."""

    def last_name(self, names: Sequence[str]) -> str | None:
        """The last parameter name over all processes, in the order of the model's names."""

    def peak_bytes(self, own: list[int | None]) -> list[int | None]:
        """Of the devices of all processes of a pipe, from those of this process."""

    def gather_state(self, own: EngineState) -> EngineState:
        """The state of the whole model in the process that saves it, an empty state in the others."""


@final
class SingleProcess:
    def share_of(self, weight: float) -> float:
        return 1.0

    def facts(self, own: StepFacts | None, *, measured: bool) -> StepFacts:
        assert own is not None, "a single process has the last layer"
        return own

    def from_last_rank(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None, "a single process has the last layer"
        return tensor.cpu()

    def norms(self, own: Tensor) -> Tensor:
        return own

    def agree_on_overflow(self, scaler: torch.amp.GradScaler) -> None:
        pass

    def first_nonfinite_output(self, own: NonfiniteOutput | None) -> NonfiniteOutput | None:
        return own

    def last_name(self, names: Sequence[str]) -> str | None:
        return names[-1] if names else None

    def peak_bytes(self, own: list[int | None]) -> list[int | None]:
        return own

    def gather_state(self, own: EngineState) -> EngineState:
        return own


@final
class RankCollectives:
    """Facts come from the rank with the last layer; rank 0 of the first replica gathers the state.

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
        self._sum_names: list[str] | None = None

    def share_of(self, weight: float) -> float:
        if self._coords.replicas == 1:
            return 1.0
        (total,) = sum_of_numbers(torch.tensor([weight], dtype=torch.float64), self._coords.data)
        return weight / float(total) if total else 0.0

    def facts(self, own: StepFacts | None, *, measured: bool) -> StepFacts:
        coords = self._coords
        names = self._shared_names(own) if measured else []
        values = [0.0] * (3 + len(names))
        if own is not None:
            values = [own.loss, own.samples, own.weight, *(own.sums[name] for name in names)]
        # First summed over the replicas, among their last ranks, then handed to the other ranks of each pipe.
        numbers = torch.tensor(values, dtype=torch.float64)
        if coords.has_output and coords.replicas > 1:
            numbers = sum_of_numbers(numbers, coords.data)
        loss, samples, weight, *sums = share_numbers(numbers, coords.last_rank, coords.pipe).tolist()
        return StepFacts(loss, int(samples), dict(zip(names, sums, strict=True)), weight)

    def _shared_names(self, own: StepFacts | None) -> list[str]:
        # Once per run, because the names never change and sharing them takes two broadcasts.
        if self._sum_names is None:
            coords = self._coords
            # In the last rank of the first replica if in any: a short batch leaves later replicas without samples.
            names = sorted(own.sums) if own is not None else []
            if coords.has_output and coords.replicas > 1:
                names = share_json(names, 0, coords.data)
            self._sum_names = list(share_json(names, coords.last_rank, coords.pipe))
        return self._sum_names

    def from_last_rank(self, tensor: Tensor | None) -> Tensor:
        return share_tensor(tensor, self._coords.last_rank, self._coords.pipe)

    def norms(self, own: Tensor) -> Tensor:
        padded = torch.cat([own, own.new_zeros(self._row_length - len(own))])
        # Gathered, not reduced: a sum over ranks would add in an order that depends on the partitioning.
        # `_norm_positions` leaves the padding out.
        rows = gather_numbers(padded, self._coords.pipe)
        return rows.flatten()[self._norm_positions]

    def agree_on_overflow(self, scaler: torch.amp.GradScaler) -> None:
        # Replicas have equal gradients by now, so it is enough to ask the ranks of this pipe.
        def largest(own: Tensor) -> Tensor:
            distributed.all_reduce(own, distributed.ReduceOp.MAX, group=self._coords.pipe)
            return own

        agree_on_overflow(scaler, self._coords.device, largest)

    def first_nonfinite_output(self, own: NonfiniteOutput | None) -> NonfiniteOutput | None:
        numbers = torch.tensor(own or (_NO_LAYER, _NO_LAYER), dtype=torch.float64)
        for group in (self._coords.pipe, self._coords.data):
            rows = gather_numbers(numbers, group)
            numbers = torch.tensor(min(rows.tolist()), dtype=torch.float64)
        layer, micro_batch = numbers.tolist()
        return None if layer == _NO_LAYER else (int(layer), int(micro_batch))

    def last_name(self, names: Sequence[str]) -> str | None:
        own = self._names.index(names[-1]) if names else -1
        rows = gather_numbers(torch.tensor([own]), self._coords.pipe)
        last = int(rows.max())
        return None if last < 0 else self._names[last]

    def peak_bytes(self, own: list[int | None]) -> list[int | None]:
        rows = gather_numbers(torch.tensor([-1 if peak is None else peak for peak in own]), self._coords.pipe)
        return [None if peak < 0 else int(peak) for peak in rows.flatten().tolist()]

    def gather_state(self, own: EngineState) -> EngineState:
        coords = self._coords
        if self._sharded and own.numbers:
            own = self._with_other_shards(own)
        # Replicas are equal to the bit, so the first one alone is saved.
        if coords.replica:
            return EngineState({})
        # Over the CPU, where the state is saved: the device of rank 0 may have no room for the whole model.
        cpu = torch.device("cpu")
        if coords.rank:
            first = Peer(0, coords.pipe, cpu)
            for tensors in (own.model, own.buffers, own.optimizer):
                first.send(Message(tensors, own.numbers))
            first.wait()
            return EngineState({})
        model, buffers, optimizer = dict(own.model), dict(own.buffers), dict(own.optimizer)
        numbers = dict(own.numbers)
        # One rank after another, in the order in which it sends: messages between two ranks arrive in order.
        for rank in range(1, coords.ranks):
            peer = Peer(rank, coords.pipe, cpu)
            for gathered in (model, buffers, optimizer):
                received = peer.receive()
                # A tensor that several ranks hold is equal in all of them.
                gathered.update(
                    {name: tensor for name, tensor in received.tensors.items() if name not in gathered}
                )
            if numbers:
                numbers["optimizer"] = merged_numbers([numbers["optimizer"], received.notes["optimizer"]])
        ordered = {name: model[name] for name in self._module.state_dict() if name in model}
        assert len(ordered) == len(model), "every rank has the same model"
        return EngineState(ordered, buffers, optimizer, numbers)

    def _with_other_shards(self, own: EngineState) -> EngineState:
        """In the first replica, the state with the optimizers of all replicas."""
        coords, cpu = self._coords, torch.device("cpu")
        if coords.replica:
            first = Peer(0, coords.data, cpu)
            first.send(Message(own.optimizer, own.numbers["optimizer"]))
            first.wait()
            return own
        optimizer, numbers = dict(own.optimizer), [own.numbers["optimizer"]]
        for replica in range(1, coords.replicas):
            received = Peer(replica, coords.data, cpu).receive()
            optimizer.update(received.tensors)
            numbers.append(received.notes)
        return replace(
            own, optimizer=optimizer, numbers={**own.numbers, "optimizer": merged_numbers(numbers)}
        )

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


def _holders(module: nn.Sequential, rank_of_layer: Sequence[int]) -> list[list[int]]:
    """For each trained parameter, in the order of names, the ranks whose layers use it, layer by layer."""
    users: dict[int, list[int]] = {}
    for layer, rank in zip(module, rank_of_layer, strict=True):
        for parameter in layer.parameters():
            users.setdefault(id(parameter), []).append(rank)
    return [users[id(parameter)] for parameter in module.parameters() if parameter.requires_grad]
