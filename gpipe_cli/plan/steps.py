"""How long a step of a plan takes: simulated action by action, or where those are too many, all workers at once."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_cli.plan.costs import Costs
from gpipe_cli.plan.wavefront import long_step, takes
from gpipe_cli.schedule.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.simulate import PartitionCost

__all__ = ["MOST_ACTIONS", "can_be_simulated", "simulated", "step_ms"]

MOST_ACTIONS = 200_000
"""Of one simulation: half a second."""


def step_ms(spec: PipelineSpec, costs: Costs, balance: Sequence[int]) -> float:
    return simulated(spec, costs.partitions(balance, spec))


def simulated(spec: PipelineSpec, parts: Sequence[PartitionCost]) -> float:
    if _actions(spec) > MOST_ACTIONS:
        return long_step(spec, parts)
    return spec.simulate(parts).step


def can_be_simulated(spec: PipelineSpec) -> bool:
    """Whether there is a way to tell its step in seconds."""
    return _actions(spec) <= MOST_ACTIONS or takes(spec)


def _actions(spec: PipelineSpec) -> int:
    return 2 * spec.partitions * spec.micro_batches
