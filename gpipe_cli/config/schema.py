"""What can be set: one dataclass per command, each field followed by the sentence the help shows.

The classes hold types and defaults only. Ranges and combinations are judged in `check`, composition from
YAML happens in `load`; nothing here knows Hydra, OmegaConf or torch. A component that can be replaced
(model, data, optimizer, ...) is an open mapping with a `_target_`; `targets` decides what may be named there.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any


@dataclass
class ScheduleConfig:
    name: str = "gpipe"
    """Order of forward and backward actions: see `gpipe ls schedules`."""


@dataclass
class PlanSearchConfig:
    auto: bool = False
    """Whether balance, chunks, schedule and checkpoint are searched for; those given are kept."""
    budget: float = 60.0
    """Seconds that planning may take, measuring included."""
    verify_budget: float = 120.0
    """Seconds that running the best plans may take, where verify=true asks for it."""
    cache: bool = True
    """Whether what was measured before is used again; false measures anew."""


@dataclass
class LogConfig:
    every: int = 10
    """Steps between two rows of metrics.jsonl and two lines of output."""
    partitions: bool = False
    """Write every (micro-batch, partition) to train.log."""
    layers: bool = False
    """Write every layer that runs to train.log."""


@dataclass
class SnapshotConfig:
    every: Any = "epoch"
    """Steps between two snapshots, or `epoch`; the last step and the best evaluation are always saved."""
    keep: int = 3
    """How many of the newest snapshots stay; the best one stays too."""
    monitor: str | None = "loss"
    """What makes a snapshot the best: the smallest loss or error, the largest top1 or other score; null: nothing."""


@dataclass
class ModelConfig:
    """The keys of every configured command: a model, samples for it, and how it is divided."""

    model: dict[str, Any] = field(default_factory=dict)
    """The model: an option of the group, or `model._target_=mypkg.build allow=[mypkg]`."""
    data: dict[str, Any] = field(default_factory=dict)
    """Where the samples come from."""
    transform: dict[str, Any] = field(default_factory=dict)
    """What is done to each sample before it is batched."""
    loss: dict[str, Any] = field(default_factory=dict)
    """What is minimised; its time counts as the last layer's."""
    balance: dict[str, Any] = field(default_factory=dict)
    """How layers are divided among partitions; `--by X` is short for balance=X."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """In which order the workers run their actions."""
    chunks: int = 4
    """Micro-batches per mini-batch."""
    devices: Any = "auto"
    """auto (all GPUs, else the CPU), a number of devices, or a list such as [cpu,cpu] or [cuda:0,cuda:1]."""
    partitions: int | None = None
    """Number of partitions; null: one per device, 2 on a CPU."""
    threads: Any = "auto"
    """Intra-op threads per worker; auto: 1 where several partitions share the CPU, else all cores."""
    batch_size: int = 64
    """Samples per mini-batch."""
    allow: list[str] = field(default_factory=list)
    """Packages of yours that `_target_` may name; on the command line only."""


@dataclass
class EngineConfig(ModelConfig):
    """The keys of whatever runs steps."""

    engine: dict[str, Any] = field(default_factory=dict)
    """What runs a step: one thread, one worker or process per partition, or one device given slice after slice."""


@dataclass
class RunConfig(EngineConfig):
    """The keys that training and evaluation have in common."""

    data_parallel: int = 1
    """Replicas of the pipeline, each with its share of every mini-batch; engine=processes has them."""
    eval_chunks: int | None = None
    """Micro-batches per mini-batch in evaluation; null: as many as `chunks`."""
    precision: str = "fp32"
    """fp32, bf16 or fp16 (autocast; fp16 scales the loss)."""
    step_timeout: float | None = None
    """Seconds after which a step that does not end is given up; null: never."""


@dataclass
class CostConfig(ModelConfig):
    """The keys that decide, besides those of the model and its division, what a step of training takes."""

    optimizer: dict[str, Any] = field(default_factory=dict)
    """What updates the parameters; its state needs memory."""
    checkpoint: Any = "except_last"
    """Which micro-batches recompute their activations in backward: always, except_last, never, or a list of them."""
    device_memory: Any = None
    """Most memory a device may need, such as 11GiB: layers are divided so that it is kept; null: no limit."""


@dataclass
class TrainConfig(RunConfig, CostConfig):
    """gpipe train"""

    lr_schedule: dict[str, Any] = field(default_factory=dict)
    """How the learning rate moves over the run."""
    plan: PlanSearchConfig = field(default_factory=PlanSearchConfig)
    """Whether the best balance, chunks, schedule and checkpoint mode are searched for first."""
    epochs: int = 3
    """Passes over the training data."""
    steps: int | None = None
    """Total number of steps; overrides `epochs`."""
    deferred_batch_norm: bool = False
    """Batch-norm statistics of the whole mini-batch instead of each micro-batch."""
    clip_grad_norm: float | None = None
    """Largest norm of all gradients together; null: no clipping."""
    seed: int = 0
    """All randomness of a run is derived from it: initialisation, data order, augmentation, dropout."""
    run_dir: str | None = None
    """Directory of the run; null: runs/<command>/<model>/<time>."""
    logger: dict[str, Any] = field(default_factory=dict)
    """Where else metrics go, besides metrics.jsonl."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is written while it runs."""
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    """When the state of training is saved, and how many such snapshots stay."""
    resume: str | None = None
    """Go on with a run: its directory or one of its snapshots; auto: with `run_dir`, if there is anything in it."""
    reset_optimizer: bool = False
    """With `resume`: start with a new optimizer state instead of the saved one, which may be missing or damaged."""
    time_limit: str | None = None
    """Stop in good order before that long, to be resumed later: 90s, 30m, 2h, 1h30m."""


@dataclass
class EvalConfig(RunConfig):
    """gpipe eval"""

    run: str | None = None
    """The run directory whose newest snapshot is evaluated, with the settings it was trained with."""
    snapshot: str | None = None
    """One snapshot of a run, instead of `run`."""
    weights: str | None = None
    """A file of weights (.safetensors, .pth), instead of `run`; model and data are those given here."""
    split: str = "test"
    """Which samples: test or train."""


@dataclass
class BalanceConfig(CostConfig):
    """gpipe balance"""


@dataclass
class ProfileConfig(EngineConfig, CostConfig):
    """gpipe profile"""

    measure: bool = True
    """Run the layers and take their time; false runs nothing, counts operations, and needs no memory."""
    timeline: bool = False
    """Run some pipelined steps too and record every action: trace.json, a picture, where time is lost."""
    steps: int = 3
    """How many steps timeline=true records, after two that warm up."""
    seconds: float = 3.0
    """How long to measure; five runs at least."""
    sort: str = "order"
    """Order of the rows: order (of the model), time (operations where none is measured) or memory."""
    top: int | None = 20
    """How many rows to show; null: all."""
    run_dir: str | None = None
    """Directory of the profile; null: runs/<command>/<model>/<time>."""


@dataclass
class PlanConfig(CostConfig):
    """gpipe plan"""

    plan: PlanSearchConfig = field(default_factory=PlanSearchConfig)
    """How long planning may take."""
    device: str | None = None
    """A device that is not here, such as a100: costs are estimated; null: they are measured on this machine."""
    verify: bool = False
    """Run the best plans and print how far the prediction was off."""
    top: int = 5
    """How many plans to show."""


SCHEMAS: dict[str, type[ModelConfig]] = {
    "train": TrainConfig,
    "eval": EvalConfig,
    "balance": BalanceConfig,
    "profile": ProfileConfig,
    "plan": PlanConfig,
}
COMPONENT_GROUPS = (
    "model",
    "data",
    "transform",
    "loss",
    "balance",
    "engine",
    "optimizer",
    "lr_schedule",
    "logger",
)
GROUPS = (*COMPONENT_GROUPS, "schedule", "plan")


@dataclass(frozen=True)
class ConfigKey:
    """One key of a command, as help and the reference show it."""

    key: str
    type: str
    default: str
    meaning: str


def config_keys(command: str) -> list[ConfigKey]:
    """Every key of the command, nested ones by their dotted path.

    Python keeps no docstring below a field, so the meaning is read from the syntax tree of this file. That is cheap
    enough for `gpipe --help`, and leaves one place to write a key and its sentence.
    """
    # Train inherits some keys by two ways; the mapping keeps them once.
    return list({key.key: key for key in _class_keys(SCHEMAS[command].__name__, prefix="")}.values())


@cache
def _class_definitions() -> dict[str, ast.ClassDef]:
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _class_keys(name: str, prefix: str) -> list[ConfigKey]:
    node = _class_definitions()[name]
    keys = [key for base in node.bases for key in _class_keys(ast.unparse(base), prefix)]
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or item.value is None:
            continue
        key, annotation = prefix + ast.unparse(item.target), ast.unparse(item.annotation)
        if annotation in _class_definitions():
            keys += _class_keys(annotation, f"{key}.")
            continue
        type_name = {"dict[str, Any]": "group", "Any": "", "list[str]": "list"}.get(
            annotation, annotation.replace(" | None", "")
        )
        keys.append(ConfigKey(key, type_name, _default(item.value), _docstring(following)))
    return keys


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _default(node: ast.expr) -> str:
    """The default as it is written on the command line."""
    if not isinstance(node, ast.Constant):
        return ""
    value = node.value
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
