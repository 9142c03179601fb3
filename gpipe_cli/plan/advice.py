"""What to say about the best plan: one sentence, from what limits it and what stands beside it. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_cli.plan.prediction import Prediction

__all__ = ["advice"]

CURES = {
    "slowest partition": (
        "the slowest partition holds the others up: a model cut into finer layers could be divided more evenly"
    ),
    "bubble": (
        "workers wait for the first micro-batch to arrive and the last to return: a larger batch_size with more "
        "chunks, or fewer partitions, shortens that"
    ),
    "transfers": "tensors on their way between devices hold it up: cut where less crosses, or use a faster link",
    "memory": "the memory limit holds it up: a larger device_memory or a smaller batch_size makes it quicker",
    "work": "devices are busy almost all the time: only faster devices, or more of them, make it quicker",
}


def advice(plans: Sequence[Prediction]) -> str:
    """`plans` from the best on; the plain run is among them where it was judged."""
    best = plans[0]
    plain = next((one for one in plans if one.is_plain), None)
    if best.is_plain:
        others = [one for one in plans if not one.is_plain and one.shape.devices > 1]
        beside = f", a pipeline takes {others[0].step_ms / best.step_ms:.2f} times as long" if others else ""
        return f"train without a pipeline: one device is quickest here{beside}"
    gain = f"{plain.step_ms / best.step_ms:.2f} times as fast as without a pipeline; " if plain else ""
    return f"{gain}{CURES[best.limit.name]}"
