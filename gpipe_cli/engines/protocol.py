"""What an engine is to the training loop, what it is built from, and what its module declares about it.

Forward, backward, clipping, the finite check and the update happen inside the engine, which owns the optimizer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.device_errors import STEP_HINT
from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.transfers import Transfers
from gpipe_cli.profiling.memory import MakeOptimizer
from gpipe_cli.profiling.records import Sample
from gpipe_cli.profiling.timeline import StepTimeline
from gpipe_cli.pytree import ModelInput
from gpipe_cli.schedule import ScheduleModule
from gpipe_cli.schedule.action import Checkpoint

Batch = tuple[ModelInput, Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of autocast, by `precision`."""
Measure = Callable[[Any, Tensor], Mapping[str, float]]
"""Sums over what the loss is a mean of, such as how many samples were classified correctly."""


@final
@dataclass(frozen=True)
class Utilization:
    """How busy the partitions were in one step."""

    busy: tuple[float, ...]
    """The fraction of the step in which each partition worked."""
    bubble: float
    """The fraction of all workers' time in which they were idle."""
    memory: tuple[int | None, ...]
    """The peak bytes allocated on each partition's device; None where the device does not report them."""


@final
@dataclass(frozen=True)
class BatchResult:
    """The results of one step."""

    loss: float
    samples: int
    sums: Mapping[str, float]
    """Over what the loss is a mean of; empty if a training step was not measured."""
    weight: float
    """What the loss is a mean of: as many samples, or whatever else the loss counts, such as tokens."""
    grad_norm: float | None = None
    skipped: bool = False
    """The update was skipped because fp16 gradients overflowed."""
    lost_updates: float | None = None
    """In one step, where parameters in half precision are rounded to nearest: the share of updates that change nothing,
    in a sample of the parameters of this process."""
    transfers: Transfers | None = None
    """What it cost to move the model to its devices and back, where the model is offloaded."""
    utilization: Utilization | None = None
    """How busy the partitions were, where the engine was asked to measure it and the step was measured."""
    timeline: StepTimeline | None = field(default=None, compare=False)
    """Every action of the one early step that the engine recorded, if it can. Equal steps take different times."""


@final
@dataclass(frozen=True)
class TrainingObjective:
    """The task of an engine: what to minimize, how to update, what to measure."""

    loss: Callable[[Any, Tensor], Tensor]
    measure: Measure
    optimizer: MakeOptimizer | None = None
    """None where nothing is trained."""
    clip_grad_norm: float | None = None
    precision: str = "fp32"
    observe: Callable[[Any, Tensor], None] | None = None
    """Looks at the output of each mini-batch of an evaluation; only the process with the last layer calls it."""


@final
@dataclass(frozen=True)
class EngineSpec:
    """What every engine is built from; the rest of its arguments are the keys of its own YAML file."""

    module: nn.Sequential
    objective: TrainingObjective
    balance: list[int]
    """Layers per partition."""
    devices: list[torch.device]
    """One per worker; for engine=processes those of the ranks of one pipe."""
    chunks: int
    eval_chunks: int
    loss_by_micro_batch: bool = False
    """Whether an evaluation computes the loss of each micro-batch by itself, and not of their outputs together: where
    the loss computes the scores a block at a time, or the model its own loss."""
    least_rows: int = 1
    """Rows of the smallest micro-batch that all layers accept in training."""
    schedule: str | ScheduleModule = "gpipe"
    checkpoint: Checkpoint = "except_last"
    deferred_batch_norm: bool = False
    step_timeout: float | None = None
    shards_optimizer: bool = False
    """Whether each replica keeps the state of the optimizer for its share of the parameters only."""
    log_layers: bool = False
    measure_utilization: bool = False
    scratch: Path = Path()
    """A folder for files of offloaded tensors."""
    make_sample: Callable[[], Sample] | None = None
    """Makes a micro-batch from which an engine may learn shapes and sizes."""
    referenced: frozenset[str] = frozenset()
    """Frozen parameters, by name, that the state of the engine leaves out: they are in files, which do not change."""


@final
@dataclass(frozen=True)
class EngineTraits:
    """What the rest of gpipe must know of an engine: its module declares it as `TRAITS`, next to `build`."""

    ignored_keys: frozenset[str] = frozenset()
    """Configuration keys that have no effect with this engine; giving one is an error."""
    has_partitions: bool = True
    """Whether `balance` divides the model; otherwise the engine runs on one device."""
    needs_processes: bool = False
    """Whether each partition runs in a process of its own, which a launcher has to start."""
    has_timeline: bool = False
    """Whether `gpipe profile timeline=true` can record its steps."""
    one_checkpoint_mode: bool = False
    """Whether `checkpoint` must be one mode for the whole model, not a list of modes per partition."""
    step_memory_hint: str = STEP_HINT
    """What to try if memory runs out in a training step."""
    build_memory_hint: str = (
        "try balance=size, more devices, or engine=offload (engine.to=disk if host memory is full)"
    )
    """What to try if the model does not fit on its devices."""


def engine_traits(target: str) -> EngineTraits:
    """The traits of the engine whose `build` has this dotted name; check first that the name is allowed."""
    module = target.rpartition(".")[0]
    traits = getattr(importlib.import_module(module), "TRAITS", None)
    if not isinstance(traits, EngineTraits):
        raise ConfigError(
            f"engine._target_={target}: {module} declares no TRAITS; "
            "add TRAITS = EngineTraits(...), a class of gpipe_cli.engines.protocol"
        )
    return traits


class Engine(Protocol):
    @property
    def module(self) -> nn.Module:
        """The model; its state_dict has the original names."""

    def train_step(self, batch: Batch, key: int, lr: float, *, measure: bool = True) -> BatchResult:
        """Make one update from one mini-batch.

        measure: also compute the sums of the facts, and return when the devices have run the step. Otherwise the last
        part of it may still be queued, so that the next step need not wait.
        """

    def eval_step(self, batch: Batch) -> BatchResult:
        """Compute loss and measures of one mini-batch; nothing changes."""

    def predict(self, input: ModelInput, choose: Callable[[Any], Tensor]) -> Tensor:
        """Run the model in eval mode on one mini-batch; the tensor that `choose` makes of the output, on the CPU.

        Only the process with the last layer calls `choose`, and every process returns its tensor.
        """

    def state(self) -> EngineState:
        """Everything that training changes, by the original names; of several processes, each saves its own part.

        Only an update changes its tensors, and forward those that are buffers.
        """

    def before_update(self, wait: Callable[[], None]) -> None:
        """From now on call `wait` each time before parameters or the optimizer's state change."""

    def load_state(self, state: EngineState) -> None:
        """Continue from a state."""

    def peak_bytes(self) -> list[int | None]:
        """The most bytes allocated at once on the device of each worker since the engine was built.

        None where the device does not report them. All ranks call it together.
        """

    def close(self) -> None:
        """End the workers; calling it twice is fine."""
