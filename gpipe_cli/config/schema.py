"""The settings of each command as a dataclass: the keys with their types and defaults.

To add a key, add a field here, a sentence in `keys.ini` and, if not every value is valid, a row in `checks`. The keys
of a component (`optimizer.lr`, ...) are lines of its YAML file in conf/.

`checks` judges ranges and combinations, `compose` fills the classes from YAML. A component that can be replaced (model,
data, optimizer, ...) is an open mapping with a `_target_`; `targets` decides what may be named there. Nothing here
knows Hydra, OmegaConf or torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any


@dataclass
class ScheduleConfig:
    name: str = "gpipe"
    path: str | None = None


@dataclass
class AutoPlanConfig:
    auto: bool = False
    budget: float = 60.0
    cache: bool = True


@dataclass
class PlanSearchConfig:
    budget: float = 60.0
    verify_budget: float = 120.0
    cache: bool = True


@dataclass
class EvaluationConfig:
    every: Any = "epoch"
    batches: int | None = None


@dataclass
class LogConfig:
    every: int = 10
    partitions: bool = False
    layers: bool = False
    console: bool = False
    predictions: bool = False


@dataclass
class SnapshotConfig:
    every: Any = "epoch"
    keep: int | None = None
    monitor: str | None = "loss"


@dataclass
class EarlyStopConfig:
    patience: int | None = None
    min_delta: float = 0.0


class NotConfigured:
    """The values that a command computes with where it has no such key: what it builds needs to ask for no class."""

    # What kind of command it is. A profile runs steps too, but only to measure them.
    trains = False
    runs_steps = False
    uses_loss = False
    uses_trained_weights = False
    plans = False
    # What a command without the key does; none of these is a key that the command takes.
    engine: Mapping[str, Any] = MappingProxyType({})
    optimizer: Mapping[str, Any] = MappingProxyType({})
    checkpoint: Any = "never"
    clip_grad_norm: float | None = None
    compile = "none"
    data_parallel = 1
    deferred_batch_norm = False
    device_memory: Any = None
    ema: float | None = None
    epochs = 0
    eval = EvaluationConfig()
    eval_chunks: int | None = None
    freeze: Sequence[str] = ()
    log = LogConfig()
    precision = "fp32"
    resume: str | None = None
    run_dir: str | None = None
    seed = 0
    shard = "none"
    step_timeout: float | None = None
    steps: int | None = None
    timeline: bool | None = None


@dataclass
class CommandConfig(NotConfigured):
    """The settings of a command."""


@dataclass
class ModelConfig(CommandConfig):
    """The keys of commands that build a model: the model, samples for it, and how to divide it."""

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    transform: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    allow: list[str] = field(default_factory=list)
    balance: dict[str, Any] = field(default_factory=dict)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    chunks: int = 4
    devices: Any = "auto"
    partitions: int | None = None
    batch_size: int = 64
    threads: Any = "auto"
    deterministic: bool = False


@dataclass
class EngineConfig(ModelConfig):
    """The keys of commands that run steps."""

    engine: dict[str, Any] = field(default_factory=dict)


@dataclass
class RunConfig(EngineConfig):
    """The keys that training and evaluation share."""

    runs_steps = True
    data_parallel: int = 1
    eval_chunks: int | None = None
    precision: str = "fp32"
    step_timeout: float | None = None


@dataclass
class CostConfig(ModelConfig):
    """The keys that, besides the model and its division, decide the cost of a training step."""

    uses_loss = True
    optimizer: dict[str, Any] = field(default_factory=dict)
    freeze: list[str] = field(default_factory=list)
    checkpoint: Any = "except_last"
    device_memory: Any = None


@dataclass
class TrainConfig(RunConfig, CostConfig):
    trains = True
    lr_schedule: dict[str, Any] = field(default_factory=dict)
    compile: str = "none"
    clip_grad_norm: float | None = None
    ema: float | None = None
    plan: AutoPlanConfig = field(default_factory=AutoPlanConfig)
    shard: str = "none"
    epochs: int = 3
    steps: int | None = None
    resume: str | None = None
    eval: EvaluationConfig = field(default_factory=EvaluationConfig)
    eval_every: int | None = None
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    deferred_batch_norm: bool = False
    seed: int = 0
    run_dir: str | None = None
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    reset_optimizer: bool = False
    time_limit: str | None = None
    logger: dict[str, Any] = field(default_factory=dict)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass
class SavedConfig(CommandConfig):
    """The keys of commands that use a snapshot."""

    run: str | None = None
    which: str | None = None
    snapshot: str | None = None
    at: str | None = None


@dataclass
class TrainedConfig(RunConfig, SavedConfig):
    """The keys of commands that use trained weights."""

    uses_trained_weights = True
    weights: str | None = None


@dataclass
class EvalConfig(TrainedConfig):
    uses_loss = True
    split: str = "test"
    seed: int = 0


@dataclass
class PredictConfig(TrainedConfig):
    input: Any = None
    top: int = 3
    out: str | None = None


@dataclass
class GenerateConfig(TrainedConfig):
    prompt: str = ""
    chat: bool | None = None
    tokens: int = 50
    temperature: float = 0.8
    top_k: int | None = 40
    seed: int = 0


@dataclass
class BalanceConfig(CostConfig):
    """gpipe balance"""


@dataclass
class ProfileConfig(EngineConfig, CostConfig):
    measure: bool = True
    timeline: bool = False
    kernels: bool = False
    steps: int = 3
    seconds: float = 3.0
    sort: str = "order"
    top: int | None = 20
    run_dir: str | None = None


@dataclass
class PlanConfig(CostConfig):
    plans = True
    plan: PlanSearchConfig = field(default_factory=PlanSearchConfig)
    device: Any = None
    precision: str = "fp32"
    tensor_cores: bool = True
    data_parallel: int = 1
    verify: bool = False
    top: int = 5
    page: str | None = None


@dataclass
class LaunchScriptConfig(TrainConfig):
    kind: str | None = None
    nodes: int | None = None
    hosts: list[str] = field(default_factory=list)
    gpus_per_node: int | None = None
    ranks_per_node: int | None = None
    cpus_per_node: int | None = None
    requeue: int = 0
    port: int | None = None
    time_limit: str | None = None


@dataclass
class CheckConfig(CommandConfig):
    devices: Any = "auto"
    run_dir: str | None = None


@dataclass
class ReportConfig(CommandConfig):
    run: list[str] = field(default_factory=list)
    out: str | None = None


@dataclass
class RunsConfig(CommandConfig):
    folder: str = "."
    watch: bool = False


@dataclass
class ExportConfig(SavedConfig):
    format: str = "safetensors"
    merge: bool = False
    out: str | None = None


@dataclass
class CpConfig(CommandConfig):
    source: str | None = None
    target: str | None = None


SCHEMAS: dict[str, type[CommandConfig]] = {
    "train": TrainConfig,
    "eval": EvalConfig,
    "predict": PredictConfig,
    "generate": GenerateConfig,
    "balance": BalanceConfig,
    "profile": ProfileConfig,
    "plan": PlanConfig,
    "launch-script": LaunchScriptConfig,
    "check": CheckConfig,
    "report": ReportConfig,
    "runs": RunsConfig,
    "export": ExportConfig,
    "cp": CpConfig,
}
POSITIONAL = {"launch-script": ("kind",), "report": ("run",), "runs": ("folder",), "cp": ("source", "target")}
"""The keys that words without a key set, in this order; a key that is a list takes all of them."""
WITH_MODEL = tuple(command for command, schema in SCHEMAS.items() if issubclass(schema, ModelConfig))
SWEPT = tuple(command for command in WITH_MODEL if command != "launch-script")
"""The commands that Hydra can run, several times with -m."""
NO_EFFECT = {
    "predict": ("data_parallel",),
    "generate": ("transform", "loss", "chunks", "eval_chunks", "batch_size"),
}
"""Keys that a command has only because it builds its parts as a training run does; giving one is an error."""
COMPONENT_GROUPS = tuple(each.name for each in fields(TrainConfig) if each.type == "dict[str, Any]")
GROUPS = (*COMPONENT_GROUPS, "schedule", "plan", "eval")
