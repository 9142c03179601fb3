"""What the other processes of engine=processes answer: those of the same pipe, and those of the other replicas.

Decides where facts come from (the process with the last layer), in which order norms stand (that of the model's names,
a tied parameter counted at its owner), and that the first process of the first replica gathers the state. Knows nothing
of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, distributed, nn

from gpipe_cli.distributed.exchange import (
    gather_numbers,
    receive_tensors,
    send_tensors,
    share_json,
    share_numbers,
    sum_of_numbers,
)
from gpipe_cli.distributed.place import Place
from gpipe_cli.engines.peers import BadOutput
from gpipe_cli.engines.protocol import StepFacts
from gpipe_cli.engines.state import EngineState, merged_numbers
from gpipe_cli.torch_internals.loss_scale import agree_on_overflow

__all__ = ["RankPeers"]

_NOTHING = 1e18
"""Larger than any layer's number, and exact in a double."""


@final
class RankPeers:
    def __init__(self, place: Place, module: nn.Sequential, rank_of_layer: Sequence[int]) -> None:
        self._place = place
        self._module = module
        self._names = [name for name, _ in module.named_parameters()]
        self._holders = _holders(module, rank_of_layer)
        self._width = max(sum(rank in of_one for of_one in self._holders) for rank in range(place.ranks))
        self._in_order = self._positions()
        self._counted: list[str] | None = None

    def share_of(self, samples: int) -> float:
        if self._place.replicas == 1:
            return 1.0
        (total,) = sum_of_numbers(torch.tensor([samples]), self._place.data, self._place.device)
        return samples / float(total)

    def facts(self, own: StepFacts | None) -> StepFacts:
        place = self._place
        if self._counted is None:
            self._counted = self._names_counted(own)
        names = self._counted
        found = [0.0] * (2 + len(names))
        if own is not None:
            found = [own.loss, own.samples, *(own.sums[name] for name in names)]
        numbers = torch.tensor(found, dtype=torch.float64)
        if place.has_output and place.replicas > 1:
            numbers = sum_of_numbers(numbers, place.data, place.device)
        loss, samples, *sums = share_numbers(numbers, place.last_rank, place.pipe, place.device).tolist()
        return StepFacts(loss, int(samples), dict(zip(names, sums, strict=True)))

    def _names_counted(self, own: StepFacts | None) -> list[str]:
        """What is counted beside the loss: the last process of the first replica has samples if any has."""
        place = self._place
        names = sorted(own.sums) if own is not None else []
        if place.has_output and place.replicas > 1:
            names = share_json(names, 0, place.data, place.device)
        found: list[str] = share_json(names, place.last_rank, place.pipe, place.device)
        return found

    def norms(self, own: Tensor) -> Tensor:
        padded = torch.cat([own, own.new_zeros(self._width - len(own))])
        rows = gather_numbers(padded, self._place.pipe, self._place.device)
        return rows.flatten()[self._in_order]

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        # Replicas have equal gradients by now, so the pipe's own processes are all there is to ask.
        def largest(own: Tensor) -> Tensor:
            distributed.all_reduce(own, distributed.ReduceOp.MAX, group=self._place.pipe)
            return own

        agree_on_overflow(scaler, optimizer, self._place.device, largest)

    def first_bad_output(self, own: BadOutput | None) -> BadOutput | None:
        numbers = torch.tensor(own or (_NOTHING, _NOTHING), dtype=torch.float64)
        for group in (self._place.pipe, self._place.data):
            rows = gather_numbers(numbers, group, self._place.device)
            numbers = torch.tensor(min(rows.tolist()), dtype=torch.float64)
        layer, micro_batch = numbers.tolist()
        return None if layer == _NOTHING else (int(layer), int(micro_batch))

    def last_of(self, names: Sequence[str]) -> str | None:
        own = self._names.index(names[-1]) if names else -1
        rows = gather_numbers(torch.tensor([own]), self._place.pipe, self._place.device)
        last = int(rows.max())
        return None if last < 0 else self._names[last]

    def whole(self, own: EngineState) -> EngineState:
        place = self._place
        if place.replica:
            return EngineState({})
        if place.rank:
            for tensors in (own.model, own.buffers, own.optimizer):
                send_tensors(tensors, own.numbers, 0, place.pipe, place.device)
            return EngineState({})
        return self._gathered(own)

    def _gathered(self, own: EngineState) -> EngineState:
        model, buffers, optimizer = dict(own.model), dict(own.buffers), dict(own.optimizer)
        numbers = dict(own.numbers)
        for rank in range(1, self._place.ranks):
            for mine in (model, buffers, optimizer):
                theirs, their_numbers = receive_tensors(rank, self._place.pipe, self._place.device)
                # What several hold is equal in all of them.
                mine.update({name: one for name, one in theirs.items() if name not in mine})
            if numbers:
                numbers["optimizer"] = merged_numbers([numbers["optimizer"], their_numbers["optimizer"]])
        order = {name: place for place, name in enumerate(self._module.state_dict())}
        return EngineState(
            {name: model[name] for name in sorted(model, key=order.__getitem__)}, buffers, optimizer, numbers
        )

    def _positions(self) -> Tensor:
        """For each parameter that is trained, where its norm stands among those gathered."""
        places = []
        counts = [0] * self._place.ranks
        for of_one in self._holders:
            owner = of_one[0]
            places.append(owner * self._width + counts[owner])
            for rank in set(of_one):
                counts[rank] += 1
        return torch.tensor(places, dtype=torch.int64)


def _holders(module: nn.Sequential, rank_of_layer: Sequence[int]) -> list[list[int]]:
    """For each parameter that is trained, in the order of names, the ranks whose layers use it, layer by layer."""
    users: dict[int, list[int]] = {}
    for layer, rank in zip(module, rank_of_layer, strict=True):
        for parameter in layer.parameters():
            users.setdefault(id(parameter), []).append(rank)
    return [users[id(parameter)] for parameter in module.parameters() if parameter.requires_grad]
