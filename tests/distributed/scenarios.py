"""What ranks do while their operations are recorded: every schedule, and the functions for a training loop of your own.

The models are as small as possible; only the tensors that cross between ranks matter here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gpipe_cli.distributed import (
    average_gradients,
    clip_grad_norm_,
    forward_backward,
    get_group,
    is_first_in_pipeline_group,
    is_last_in_pipeline_group,
    setup_process_groups,
)
from gpipe_cli.distributed.groups import DATA, PIPE
from gpipe_cli.distributed.world import World
from gpipe_cli.engines import processes
from gpipe_cli.engines.protocol import EngineSpec, TrainingObjective
from gpipe_cli.losses.cross_entropy import CrossEntropy
from gpipe_cli.runs.snapshots.contents import write_snapshot
from gpipe_cli.runs.snapshots.record import TrainingRecord
from gpipe_cli.schedule import traits
from gpipe_cli.sequential.by_list import partition_uniform
from gpipe_cli.skip import pop, skippable, stash
from gpipe_cli.training.loop import Position
from tests.distributed.cases import THERE_AND_BACK, schedule_called
from tests.distributed.posted_operations import recording
from tests.distributed.rendezvous import Operation, Program
from tests.support.forked_ranks import run_ranks

WIDTH = 3
OWN_LOOP = "own loop"
"""In place of a schedule: `forward_backward` with functions of the user."""


@dataclass(frozen=True)
class Scenario:
    schedule: str
    model: str
    ranks: int
    chunks: int
    replicas: int = 1
    several: int = 2
    """Partitions per rank, where the schedule allows several."""
    sharded: bool = False
    """Whether the replicas divide the optimizer's state."""

    @property
    def name(self) -> str:
        return "-".join(map(str, astuple(self)))

    @property
    def partitions(self) -> int:
        several = self.schedule == THERE_AND_BACK or traits(self.schedule).several_per_device
        per_rank = self.several if several else 1
        return self.ranks // self.replicas * per_rank


@skippable(stash=["far", "near"])
class Stash(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        yield stash("far", input)
        yield stash("near", input * 2)
        return super().forward(input)


@skippable(pop=["near"])
class PopNear(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        near = yield pop("near")
        return super().forward(input + near)


@skippable(pop=["far"])
class PopFar(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        far = yield pop("far")
        return super().forward(input + far)


class Pair(nn.Linear):
    """Takes a tensor or a pair and returns a pair, of which the second needs no gradient."""

    def forward(self, given: Any) -> Any:
        value = given[0] if isinstance(given, tuple) else given
        return super().forward(value), value.argmax(1)


class First(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0]


def plain(layers: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(layers)]


def skips(layers: int) -> list[nn.Module]:
    """Skips that pass through every partition, and through half of them."""
    result = plain(layers)
    result[0], result[layers // 2], result[-1] = (kind(WIDTH, WIDTH) for kind in (Stash, PopNear, PopFar))
    return result


def tied(layers: int) -> list[nn.Module]:
    """Two weights with users in three ranks each, in different orders of owners."""
    result = plain(layers)
    for owner, *users in ((0, layers // 2, -1), (1 % layers, layers // 2 - 1, -2)):
        for user in users:
            result[user].weight = result[owner].weight  # type: ignore[assignment]
    return result


def pairs(layers: int) -> list[nn.Module]:
    return [*(Pair(WIDTH, WIDTH) for _ in range(layers - 1)), First()]


def frozen(layers: int) -> list[nn.Module]:
    """No gradient crosses the boundaries of the first half."""
    result = plain(layers)
    for layer in result[: (layers + 1) // 2]:
        layer.requires_grad_(False)
    return result


MODELS: dict[str, Callable[[int], list[nn.Module]]] = {
    function.__name__: function for function in (plain, skips, tied, pairs, frozen)
}


def record(
    scenarios: Sequence[Scenario], folder: Path, seconds: float
) -> Iterator[tuple[Scenario, list[Program]]]:
    """Run the scenarios on real ranks; what each rank posted."""
    for ranks, group in itertools.groupby(scenarios, key=lambda scenario: scenario.ranks):
        own, of_ranks = list(group), folder / f"{ranks}-ranks"
        (of_ranks / "run" / "snapshots").mkdir(parents=True)
        run_ranks(partial(_record, own), ranks, of_ranks, seconds)
        for scenario in own:
            yield scenario, [_load(of_ranks / f"{scenario.name}-{rank}.json") for rank in range(ranks)]


def _load(path: Path) -> Program:
    return [
        tuple(Operation(kind, group, tuple(members), content) for kind, group, members, content in batch)
        for batch in json.loads(path.read_text())
    ]


def _record(scenarios: Sequence[Scenario], rank: int, ranks: int, folder: Path) -> None:
    replicas = None
    for scenario in scenarios:
        with recording() as recorder:
            if scenario.replicas != replicas:
                replicas = scenario.replicas
                setup_process_groups([(DATA, replicas), (PIPE, ranks // replicas)])
            torch.manual_seed(0)
            if scenario.schedule == OWN_LOOP:
                _own_loop(scenario)
            else:
                _engine(scenario, folder)
        (folder / f"{scenario.name}-{rank}.json").write_text(json.dumps(recorder.program))


def _engine(scenario: Scenario, folder: Path) -> None:
    """Three steps of unequal sizes, the last without rows for the second replica, an evaluation and a snapshot."""
    model = nn.Sequential(*MODELS[scenario.model](max(3, scenario.partitions)))
    loss = CrossEntropy()
    spec = EngineSpec(
        model,
        TrainingObjective(loss, loss.measure, partial(torch.optim.SGD, lr=0.1), clip_grad_norm=1.0),
        [len(layers) for layers in _parts(model, scenario.partitions)],
        [torch.device("cpu")] * (scenario.ranks // scenario.replicas),
        chunks=scenario.chunks,
        eval_chunks=scenario.chunks,
        schedule=schedule_called(scenario.schedule, scenario.ranks // scenario.replicas, scenario.chunks),
        checkpoint="never",
        shards_optimizer=scenario.sharded,
    )
    engine = processes.build(spec)
    replica = distributed.get_rank(get_group(DATA))
    # Rows that divide evenly make one flush, one row more makes two. Replicas with other rows post other operations.
    for rows in (2 * scenario.chunks, 2 * scenario.chunks + 1 - replica, 1 - replica):
        batch = torch.randn(rows, WIDTH), torch.randint(WIDTH, (rows,))
        engine.train_step(batch, key=0, lr=0.1)
    engine.eval_step(batch)
    write_snapshot(
        folder / "run" / "snapshots" / scenario.name,
        engine.state(),
        TrainingRecord(Position(), None, 1, 0, 1, {}, {}),
        lambda: None,
        World.current().for_thread(timedelta(minutes=10)),
    )
    engine.close()


def _parts(model: nn.Sequential, partitions: int) -> list[list[nn.Module]]:
    return [partition_uniform(list(model), partitions, index) for index in range(partitions)]


def _own_loop(scenario: Scenario) -> None:
    """A training step with an averaged and clipped gradient, then an evaluation."""
    layer = (Pair if scenario.model == "pairs" else nn.Linear)(WIDTH, WIDTH)
    inputs = [torch.randn(2 * scenario.chunks + 1, WIDTH)] if is_first_in_pipeline_group() else []

    def forward(given: Any) -> Any:
        output = layer(tuple(given) if isinstance(given, list) else given)
        if not is_last_in_pipeline_group():
            return output
        return (output[0] if isinstance(output, tuple) else output).mean()

    forward_backward(None, forward, None, inputs, num_microbatches=scenario.chunks)
    if scenario.replicas > 1:
        average_gradients(layer.parameters())
    clip_grad_norm_(layer.parameters(), 1.0)
    forward_backward(None, forward, None, inputs, num_microbatches=scenario.chunks, forward_only=True)
