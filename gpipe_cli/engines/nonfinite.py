"""Where numbers stopped being finite: found by running the step that failed once more, with eyes open.

Randomness goes by keys, so the second run repeats the first. It is only made when training ends for it, so that
what it changes (buffers, gradients) is of no consequence. Knows nothing of when numbers are judged.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.engines.collectives import NonfiniteOutput
from gpipe_cli.pipeline.context import current_microbatch, is_recomputing
from gpipe_cli.sequential import layer_names

__all__ = ["described", "first_nonfinite_output", "nonfinite_gradients"]


def first_nonfinite_output(module: nn.Sequential, run: Callable[[], object]) -> NonfiniteOutput | None:
    """The first layer, and its first micro-batch, that gives a number that is not finite when `run` is called."""
    bad: list[tuple[int, int]] = []

    def look(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, input: Any, output: Any) -> None:
            micro_batch = current_microbatch()
            if micro_batch is not None and not is_recomputing() and not _finite(output):
                bad.append((layer, micro_batch.index))

        return hook

    with contextlib.ExitStack() as hooks:
        for index, layer in enumerate(module):
            hooks.callback(layer.register_forward_hook(look(index)).remove)
        run()
    return min(bad, default=None)


def described(module: nn.Sequential, balance: Sequence[int], place: NonfiniteOutput) -> str:
    index, micro_batch = place
    name, partition = layer_names(module)[index], bisect_right(list(accumulate(balance)), index)
    kind = type(module[index]).__name__
    return f"layer '{name}' ({kind}) in partition {partition}, micro-batch {micro_batch}"


def nonfinite_gradients(module: nn.Module) -> list[str]:
    """The parameters whose gradient is not finite; backward reached the last of them first."""
    return [name for name, one in module.named_parameters() if one.grad is not None and not _finite(one.grad)]


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    return all(_finite(one) for one in value) if isinstance(value, tuple) else True
