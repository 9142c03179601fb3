"""Which layer's backward failed: autograd itself does not say.

Decides it from the graph that is left. The engine runs a graph's nodes from the last made to the first; a node
belongs to the layer that was running when it was made. The node that failed is in the traceback if it is a Python
function, and repeats its complaint if what it saved was overwritten; otherwise it is among those between the last
that has run and the next that has not. Knows nothing of partitions.
"""

from __future__ import annotations

import bisect
import traceback
from collections.abc import Sequence

from torch.autograd import graph

from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.torch_internals.graph_progress import Node, complaint, has_run, nodes_behind, number_of

__all__ = ["failed_in_backward"]


def failed_in_backward(
    layers: Sequence[Layer],
    roots: Sequence[graph.GradientEdge | None],
    marks: Sequence[int],
    error: BaseException,
) -> str:
    """In words, the layer of `layers` whose backward raised `error`, or those it must be among.

    `marks` are the numbers of the next node before the first layer and after each; a loss after the last layer has
    a mark of its own.
    """
    places = _suspects(roots, marks, error) or (0, len(layers) - 1)
    if places[0] == len(layers):
        return "the loss function"
    first, last = (layers[min(place, len(layers) - 1)] for place in places)
    return f"layer {first!r}" if first is last else f"layers {first!r} to {last!r}"


def _suspects(
    roots: Sequence[graph.GradientEdge | None], marks: Sequence[int], error: BaseException
) -> tuple[int, int] | None:
    """The first and last place of those that may have failed; None if nothing is known."""
    nodes = _made_here([root.node for root in roots if root is not None], marks)
    if not nodes:
        return None
    failed = _in_traceback(nodes, error) or _with_the_same_words(nodes, error)
    if failed is not None:
        place = _place(failed, marks)
        return place, place
    return _between(nodes, marks)


def _between(nodes: dict[Node, int], marks: Sequence[int]) -> tuple[int, int] | None:
    latest_first = sorted(nodes, key=nodes.__getitem__, reverse=True)
    state = [has_run(node) for node in latest_first]
    if True not in state:
        return None
    last_run = len(state) - 1 - state[::-1].index(True)
    following = latest_first[last_run + 1 :]
    waiting = [place for place, node in enumerate(following) if has_run(node) is False]
    candidates = following[: waiting[0] + 1] if waiting else following
    places = [_place(node, marks) for node in candidates]
    return (min(places), max(places)) if places else None


def _in_traceback(nodes: dict[Node, int], error: BaseException) -> Node | None:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, graph.Node) and value in nodes:
                return value
    return None


def _with_the_same_words(nodes: dict[Node, int], error: BaseException) -> Node | None:
    """A node that finds a tensor it saved written in place says so as often as it is asked."""
    words = str(error)
    return next((node for node in nodes if words and complaint(node) == words), None)


def _made_here(roots: Sequence[Node], marks: Sequence[int]) -> dict[Node, int]:
    """The nodes behind `roots` that layers made, with their numbers: leaves' accumulators have none of these."""
    numbers = {node: number_of(node) for node in nodes_behind(roots)}
    return {node: number for node, number in numbers.items() if marks[0] <= number < marks[-1]}


def _place(node: Node, marks: Sequence[int]) -> int:
    """Layer 0 made the nodes from marks[0] to marks[1] - 1."""
    return bisect.bisect_right(marks, number_of(node)) - 1
