"""Notes on errors: where in the pipe an error was raised.

`ActionLoop.fail` stops the other workers; this file only describes the failure. Describing it never replaces it:
whatever the description raises, the original error is delivered. Autograd does not say which layer's backward failed,
so `layer_that_failed` looks at the graph that is left. The engine runs nodes from the last created to the first, and
a node belongs to the layer that was running when it was created. The failed node is in the traceback if it is a
Python function, and repeats its message if a tensor it saved was overwritten; otherwise it is between the last node
that has run and the next that has not.
"""

from __future__ import annotations

import bisect
import logging
import traceback
from collections.abc import Callable, Sequence

import torch
from torch.autograd import graph

from gpipe_cli.accelerator.device_errors import is_out_of_memory, on_device
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.schedule.action import Action
from gpipe_cli.torch_internals.autograd import Node, has_run, nodes_behind, number_of, saved_tensor_error

logger = logging.getLogger("gpipe_cli.pipeline")

OFFLOAD_PHASES = {"load": "loading", "update": "updating", "store": "storing"}
"""What is done with a whole partition that is offloaded, and not with one of its layers."""


def add_note(error: BaseException, describe: Callable[[], str]) -> None:
    """Add the text that `describe` returns to the notes of `error`."""
    try:
        error.add_note(describe())
    except BaseException:
        logger.debug("gpipe could not describe an error", exc_info=True)


def failure_note(action: Action, phase: str, layer: str, device: torch.device, error: BaseException) -> str:
    if phase == "copy":  # where it goes to is in another note
        return f"sent by partition {action.partition}, micro-batch {action.micro_batch}, action {action}"
    partition = f"in partition {action.partition}{on_device(device, error)}"
    if phase in OFFLOAD_PHASES:
        return f"{partition}, while {OFFLOAD_PHASES[phase]} its parameters"
    note = f"{partition}, {layer}, micro-batch {action.micro_batch}, action {action} ({phase})"
    if phase == "recompute" and not is_out_of_memory(error):
        note += (
            ". The forward succeeded: something that the layer keeps outside of itself may be gone by now; "
            "hand tensors from layer to layer with @skippable"
        )
    return note


def layer_that_failed(
    layers: Sequence[Layer],
    roots: Sequence[graph.GradientEdge | None],
    node_numbers: Sequence[int],
    error: BaseException,
) -> str:
    """Name the layer whose backward raised `error`, or the range of layers it must be in.

    node_numbers: the number of the next node before the first layer and after each; a loss after the last layer has
    one of its own.
    """
    places = _suspects(roots, node_numbers, error) or (0, len(layers) - 1)
    if places[0] == len(layers):
        return "the loss function"
    first, last = (layers[min(place, len(layers) - 1)] for place in places)
    return f"layer {first!r}" if first is last else f"layers {first!r} to {last!r}"


def _suspects(
    roots: Sequence[graph.GradientEdge | None], node_numbers: Sequence[int], error: BaseException
) -> tuple[int, int] | None:
    """The first and last place of the layers that may have failed; None if nothing is known."""
    nodes = _created_by_layers([root.node for root in roots if root is not None], node_numbers)
    if not nodes:
        return None
    failed = _in_traceback(nodes, error) or _with_the_same_message(nodes, error)
    if failed is not None:
        place = _place(failed, node_numbers)
        return place, place
    return _between(nodes, node_numbers)


def _between(nodes: dict[Node, int], node_numbers: Sequence[int]) -> tuple[int, int] | None:
    latest_first = sorted(nodes, key=nodes.__getitem__, reverse=True)
    state = [has_run(node) for node in latest_first]
    if True not in state:
        return None
    last_run = len(state) - 1 - state[::-1].index(True)
    following = latest_first[last_run + 1 :]
    waiting = [place for place, node in enumerate(following) if has_run(node) is False]
    candidates = following[: waiting[0] + 1] if waiting else following
    places = [_place(node, node_numbers) for node in candidates]
    return (min(places), max(places)) if places else None


def _in_traceback(nodes: dict[Node, int], error: BaseException) -> Node | None:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, graph.Node) and value in nodes:
                return value
    return None


def _with_the_same_message(nodes: dict[Node, int], error: BaseException) -> Node | None:
    """A node that finds a tensor it saved written in place says so as often as it is asked."""
    message = str(error)
    return next((node for node in nodes if message and saved_tensor_error(node) == message), None)


def _created_by_layers(roots: Sequence[Node], node_numbers: Sequence[int]) -> dict[Node, int]:
    """The nodes behind `roots` that layers created, with their numbers; accumulators of leaves have other numbers."""
    numbers = {node: number_of(node) for node in nodes_behind(roots)}
    return {node: number for node, number in numbers.items() if node_numbers[0] <= number < node_numbers[-1]}


def _place(node: Node, node_numbers: Sequence[int]) -> int:
    """Layer 0 created the nodes from node_numbers[0] to node_numbers[1] - 1."""
    return bisect.bisect_right(node_numbers, number_of(node)) - 1
