"""A lower bound for the step of every order of a problem: how far a searched order can be from the best one."""

from __future__ import annotations

from itertools import accumulate
from math import floor

from gpipe_cli.schedule.search_problem import SearchProblem
from gpipe_cli.schedule.simulate import PartitionCost


def step_bound(problem: SearchProblem) -> float:
    """No order that fits the memory takes less, whatever it does; in the unit of the costs."""
    heads, tails = _heads(problem), _tails(problem)
    all_work = sum(_least_work(problem, own) for own in problem.own)
    bounds = []
    if problem.synchronized:
        bounds.append(all_work / min(problem.cores or problem.devices, problem.devices))
    for worker, own in enumerate(problem.own):
        head, work = heads[own[0]], _least_work(problem, own)
        # Nothing runs before its first input arrives. Unsynchronized, that time belongs to the previous step.
        bounds.append(work + (head if problem.synchronized else 0.0))
        # After its forwards and input gradients, which need not wait for weight gradients, the last gradient still
        # passes all earlier partitions.
        critical = problem.chunks * sum(
            problem.costs[one].forward + _gradient(problem.costs[one]) for one in own
        )
        bounds.append(head + critical + tails[own[0]])
        if problem.memory:
            bounds += _memory_bounds(problem, worker, heads)
    return max(bounds)


def _gradient(cost: PartitionCost) -> float:
    """The least time from an output's gradient to that of the input: half a backward, or a whole one."""
    return min(cost.split[0], cost.backward)


def _least_kept(problem: SearchProblem, cost: PartitionCost) -> float:
    """How long the backward of a split micro-batch keeps it, as if all of it were kept."""
    return cost.split[0] + problem.kept_share * cost.split[1]


def _least_work(problem: SearchProblem, own: list[int]) -> float:
    """A backward in one piece may take less than its parts."""
    return sum(
        problem.chunks * (cost.forward + min(cost.backward, sum(cost.split)))
        + problem.stops[partition] * cost.recompute
        for partition in own
        for cost in (problem.costs[partition],)
    )


def _heads(problem: SearchProblem) -> list[float]:
    """When the first input can arrive at each partition."""
    steps = [
        cost.forward + transfer
        for cost, transfer in zip(problem.costs, [*problem.transfers, 0.0], strict=True)
    ]
    return [0.0, *accumulate(steps)][: problem.partitions]


def _tails(problem: SearchProblem) -> list[float]:
    """What follows the last input gradient of each partition: those of the earlier ones, and a weight gradient."""
    steps = [
        _gradient(cost) + transfer for cost, transfer in zip(problem.costs, problem.transfers, strict=False)
    ]
    first = problem.costs[0]
    weights = min(first.split[1], first.backward - _gradient(first))
    return [weights + passed for passed in [0.0, *accumulate(steps)][: problem.partitions]]


def _memory_bounds(problem: SearchProblem, worker: int, heads: list[float]) -> list[float]:
    own, limit = problem.own[worker], problem.memory[worker]
    if any(problem.stops[partition] for partition in own):
        return []  # what a micro-batch keeps changes when it is recomputed: left to the other bounds
    costs = problem.costs
    end = heads[-1] + costs[-1].forward
    back = [0.0] * problem.partitions
    for partition in reversed(range(problem.partitions - 1)):
        back[partition] = back[partition + 1] + _gradient(costs[partition + 1]) + problem.transfers[partition]
    # A micro-batch is kept from its forward until its input gradient, and partly until its weight gradient: the most
    # that fit at once, over the whole step.
    area = sum(
        problem.chunks
        * costs[one].saved_bytes
        * (end - heads[one] + back[one] + min(costs[one].backward, _least_kept(problem, costs[one])))
        for one in own
    )
    bounds = [area / limit]
    smallest = min(costs[one].saved_bytes for one in own)
    if problem.synchronized and smallest > 0:
        # Until its first gradient arrives, a worker can only run as many forwards as fit.
        longest = max(costs[one].forward for one in own)
        fitting = min(floor(limit / smallest), len(own) * problem.chunks)
        bounds.append(end + back[own[-1]] + _least_work(problem, own) - fitting * longest)
    return bounds
