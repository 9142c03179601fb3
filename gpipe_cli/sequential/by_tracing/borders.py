"""The places where a model could be cut in both of its modes at once.

Where training and evaluation share one graph a border is a place in it. Where they have two, it is a place in
each, so that all they have in common is on the same side. Decides which borders are possible, not which of
them become cuts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import final

from torch import fx, nn

from gpipe_cli.sequential.by_tracing.flow import Flow

__all__ = ["Border", "borders_of"]


@final
@dataclass(frozen=True, slots=True)
class Border:
    places: tuple[int, ...]
    """Steps before it, in each flow."""
    obstacle: str | None
    """Why there can be no cut; None where there can."""
    tensors: int
    """How many cross, in the mode in which fewer do."""
    bytes: int
    holders: int
    """Steps before it that use modules or tensors of the model."""


def borders_of(flows: Sequence[Flow], model: nn.Module) -> list[Border]:
    """All borders in order, the two ends of the model left out."""
    places = _places(flows)
    torn = _torn(flows, places, model) if places else {}
    return [_border(flows, place, torn.get(index)) for index, place in enumerate(places)]


def _border(flows: Sequence[Flow], places: tuple[int, ...], torn: str | None) -> Border:
    pairs = list(zip(flows, places, strict=True))
    obstacles = (flow.obstacle(place) for flow, place in pairs)
    return Border(
        places,
        torn or next(filter(None, obstacles), None),
        min(flow.tensors(place) for flow, place in pairs),
        sum(flow.bytes(place) for flow, place in pairs),
        sum(flow.holders(place) for flow, place in pairs),
    )


def _places(flows: Sequence[Flow]) -> list[tuple[int, ...]]:
    if len(flows) == 1:
        return [(place,) for place in range(1, len(flows[0].steps))]
    ours, theirs = ([_likeness(step) for step in flow.steps] for flow in flows)
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    both = {
        (block.a + offset, block.b + offset)
        for block in blocks
        if block.size
        for offset in range(block.size + 1)
    }
    return sorted(both - {(0, 0), (len(ours), len(theirs))})


def _likeness(step: fx.Node) -> tuple[str, str, str]:
    stack = step.meta.get("nn_module_stack") or {}
    return step.op, str(step.target), next(reversed(stack), "")


def _torn(flows: Sequence[Flow], places: Sequence[tuple[int, ...]], model: nn.Module) -> dict[int, str]:
    """Borders between two uses of a module that has buffers: two layers would write the same ones."""
    torn: dict[int, str] = {}
    for path, uses in _uses_by_module(flows, places).items():
        if min(uses) < max(uses) and next(model.get_submodule(path).buffers(), None) is not None:
            reason = f"'{path}', which has buffers, is used on both sides"
            torn |= dict.fromkeys(range(min(uses), max(uses)), reason)
    return torn


def _uses_by_module(flows: Sequence[Flow], places: Sequence[tuple[int, ...]]) -> dict[str, list[int]]:
    """For each called module the numbers of borders that lie before its calls."""
    uses: dict[str, list[int]] = defaultdict(list)
    for flow, of_flow in zip(flows, zip(*places, strict=True), strict=True):
        for index, step in _calls(flow):
            uses[str(step.target)].append(bisect_right(of_flow, index))
    return uses


def _calls(flow: Flow) -> Iterator[tuple[int, fx.Node]]:
    return ((index, step) for index, step in enumerate(flow.steps) if step.op == "call_module")
