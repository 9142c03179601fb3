"""Training cases that run on ranks or in one process, for tests that compare their facts and final state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gpipe_cli.build.optimizer import optimizer_factory
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.engines import processes, single
from gpipe_cli.engines.protocol import Batch, BatchResult, Engine, EngineSpec, TrainingObjective
from gpipe_cli.engines.state import EngineState
from gpipe_cli.plan.order_search import with_joined_backwards
from gpipe_cli.pytree import map_tensors
from gpipe_cli.schedule import ScheduleModule
from gpipe_cli.schedule.action import Checkpoint
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.orders import zero_bubble_v
from gpipe_cli.sequential import partition_uniform
from tests.distributed.tasks import make

CPU = torch.device("cpu")
MOMENTUM = "SGD with momentum"
AVERAGED = " in groups, averaged"
ROUNDED = " rounding stochastically"
"""Each follows the name of an optimizer."""
THERE_AND_BACK = "there and back"
"""In place of the name of a schedule: two partitions per rank, there and back, some backwards whole and some split."""


def schedule_called(name: str, ranks: int, chunks: int) -> str | ScheduleModule:
    if name != THERE_AND_BACK:
        return name
    whole = [partition % (chunks + 1) for partition in range(2 * ranks)]
    return FixedOrder(name, with_joined_backwards(zero_bubble_v(2 * ranks, chunks, ranks), whole))


@dataclass(frozen=True)
class Case:
    task: str
    schedule: str = "gpipe"
    checkpoint: Checkpoint = "never"
    rows: tuple[int, ...] = (10, 3)
    """Rows of the mini-batch of each step: uneven sizes, and fewer micro-batches than partitions."""
    chunks: int = 4
    replicas: int = 1
    optimizer: str = "AdamW"
    clip: float | None = 0.1
    precision: str = "fp32"
    deferred: bool = False
    least_rows: int = 1
    spoilt: int | None = None
    """The step whose input is not finite."""
    resumed: int = 0
    """Steps that one process trains before the ranks resume."""
    sharded: bool = False
    """With shard=optimizer."""

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values()).replace(" ", "")

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Batch:
        """The mini-batch of a step; a replica gets its consecutive part."""
        rows = self.rows[step]
        task = make(self.task, rows + step)
        input, target = map_tensors(
            lambda tensor: tensor[step:].tensor_split(replicas)[replica], (task.input, task.target)
        )
        return (input * float("inf") if self.spoilt == step else input), target

    def objective(self, loss: Any, model: nn.Sequential | None = None) -> TrainingObjective:
        options = {"momentum": 0.9, "nesterov": True} if self.optimizer == MOMENTUM else {}
        kind = getattr(torch.optim, self.optimizer.partition(" ")[0])
        make_optimizer: Any = partial(kind, lr=0.0, **options)
        if model is not None and self.optimizer.endswith(AVERAGED):
            node = {"_target_": "torch.optim.AdamW", "lr": 0.0, "weight_decay": 0.1, "no_decay": ["bias"]}
            groups = [{"match": "*.weight", "lr_scale": 3, "amsgrad": True}]
            make_optimizer = optimizer_factory(
                TrainConfig(optimizer={**node, "groups": groups}, ema=0.5), model
            )
        if model is not None and self.optimizer.endswith(ROUNDED):
            node = {"_target_": f"torch.optim.{kind.__name__}", "lr": 0.0, "rounding": "stochastic"}
            make_optimizer = optimizer_factory(TrainConfig(optimizer=node), model)
        return TrainingObjective(loss, loss.measure, make_optimizer, self.clip, self.precision)

    def alone(self, device: torch.device = CPU) -> Engine:
        """One process, with as many times the micro-batches as there are replicas."""
        task = make(self.task, 1)
        spec = EngineSpec(
            task.model,
            self.objective(task.loss, task.model),
            [len(task.model)],
            [device],
            chunks=self.chunks * self.replicas,
            eval_chunks=3,
            least_rows=self.least_rows,
            deferred_batch_norm=self.deferred,
        )
        return single.build(spec)

    def on_ranks(self, ranks: int, devices: list[torch.device] | None = None) -> Engine:
        task = make(self.task, 1)
        partitions = ranks * 2 if self.schedule in ("interleaved", THERE_AND_BACK) else ranks
        spec = EngineSpec(
            task.model,
            self.objective(task.loss, task.model),
            [len(layers) for layers in partition_uniform(task.model, partitions)],
            devices or [CPU] * ranks,
            chunks=self.chunks,
            eval_chunks=3,
            least_rows=self.least_rows,
            checkpoint=self.checkpoint,
            schedule=schedule_called(self.schedule, ranks, self.chunks),
            deferred_batch_norm=self.deferred,
            shards_optimizer=self.sharded,
        )
        return processes.build(spec)


@dataclass
class CaseResult:
    """The facts of every step of a case, and the state at its end."""

    facts: list[dict[str, Any]] = field(default_factory=list)
    state: EngineState = field(default_factory=lambda: EngineState({}))

    def add(self, facts: BatchResult) -> None:
        self.facts.append({**asdict(facts), "sums": dict(facts.sums)})


def _in_memory(state: EngineState) -> EngineState:
    """Parameters on disk can be read only until their engine is closed."""
    if state.fetch is None:
        return state
    model, optimizer = (
        {name: state.value(tensor).clone() for name, tensor in part.items()}
        for part in (state.model, state.optimizer)
    )
    return replace(state, model=model, optimizer=optimizer, fetch=None)


def run(case: Case, engine: Engine, batch: Callable[[int], Batch], steps: range | None = None) -> CaseResult:
    """Train, and evaluate after each step."""
    result = CaseResult()
    for step in range(len(case.rows)) if steps is None else steps:
        result.add(engine.train_step(batch(step), key=step, lr=0.01))
        result.add(engine.eval_step(batch(step)))
    result.state = _in_memory(engine.state())
    engine.close()
    return result
