"""The settings of each command as a dataclass; the help shows the docstring below each field.

To add a key, add a field with a docstring here and, if not every value is valid, a row in `checks`. The keys of a
component (`optimizer.lr`, ...) are lines of its YAML file in conf/.

A comment such as `# [The step]` is the heading in the help of the keys below it, up to the next one or the end of the
class; keys below no heading come first. The classes hold types and defaults only: `checks` judges ranges and
combinations, `compose` fills the classes from YAML. A component that can be replaced (model, data, optimizer, ...) is
an open mapping with a `_target_`; `targets` decides what may be named there. Nothing here knows Hydra, OmegaConf or
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any


@dataclass
class ScheduleConfig:
    name: str = "gpipe"
    """Order of forward and backward actions: see `gpipe ls schedules`."""
    path: str | None = None
    """With schedule=file: a file with the order, in torch's form if it ends in .csv, otherwise in gpipe's."""


@dataclass
class AutoPlanConfig:
    auto: bool = False
    """Search for balance, chunks, schedule and checkpoint; keys you give stay fixed."""
    budget: float = 60.0
    """Time limit for planning in seconds, including measurements."""
    cache: bool = True
    """Reuse earlier measurements; false measures again."""


@dataclass
class PlanSearchConfig:
    budget: float = 60.0
    """Time limit for planning in seconds, including measurements."""
    verify_budget: float = 120.0
    """Time limit in seconds for running the best plans with verify=true."""
    cache: bool = True
    """Reuse earlier measurements; false measures again."""


@dataclass
class LogConfig:
    every: int = 10
    """Steps between rows of metrics.jsonl; the first step and those before evaluations have a row too. The console
    prints at intervals of time instead."""
    partitions: bool = False
    """Log every (micro-batch, partition) to train.log."""
    layers: bool = False
    """Log every layer that runs to train.log: step, phase, micro-batch, partition, name, class and milliseconds."""
    console: bool = False
    """Print the lines of log.partitions and log.layers on the terminal as well."""
    predictions: bool = False
    """Show on the page of the run which class evaluations take for which, with some samples, or the text that a
    language model writes at the end; costs time."""


@dataclass
class SnapshotConfig:
    every: Any = "epoch"
    """Steps between snapshots, or `epoch`; the last step and the best evaluation are always saved."""
    keep: int = 3
    """How many of the newest snapshots to keep, in addition to the best one."""
    monitor: str | None = "loss"
    """The metric that decides the best snapshot: smallest loss or error, largest top1 or other score; null: none."""


@dataclass
class EarlyStopConfig:
    patience: int | None = None
    """End the run after this many evaluations in a row without a better snapshot.monitor; null: never."""
    min_delta: float = 0.0
    """How much better an evaluation must be to count as an improvement."""


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
    data_parallel = 1
    deferred_batch_norm = False
    device_memory: Any = None
    ema: float | None = None
    epochs = 0
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

    # [Model and data]
    model: dict[str, Any] = field(default_factory=dict)
    """The model: an option, or code of yours, such as model=mypkg.models:build."""
    data: dict[str, Any] = field(default_factory=dict)
    """Where the samples come from."""
    transform: dict[str, Any] = field(default_factory=dict)
    """How each sample is transformed before batching."""
    loss: dict[str, Any] = field(default_factory=dict)
    """What training minimizes; its time counts towards the last layer."""
    allow: list[str] = field(default_factory=list)
    """Packages of yours that `_target_` may name; on the command line only."""
    # [Division into partitions]
    balance: dict[str, Any] = field(default_factory=dict)
    """How layers are divided among partitions; `--by X` is short for balance=X."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The order in which workers run their actions."""
    # [Keys]
    chunks: int = 4
    """Micro-batches per mini-batch."""
    devices: Any = "auto"
    """auto (all accelerators, else the CPU), a number of devices, or a list such as [cpu,cpu] or [cuda:0,cuda:1]."""
    partitions: int | None = None
    """Number of partitions; null: one per device, 2 on a CPU."""
    batch_size: int = 64
    """Samples per mini-batch."""
    # [The step]
    threads: Any = "auto"
    """Intra-op threads per worker; auto: 1 where several partitions share the CPU, else all cores."""
    deterministic: bool = False
    """Same bits on every run, on GPUs too: deterministic kernels, no TF32, no kernel choice by benchmark; slower."""


@dataclass
class EngineConfig(ModelConfig):
    """The keys of commands that run steps."""

    # [The step]
    engine: dict[str, Any] = field(default_factory=dict)
    """What runs a step: one thread, one worker or process per partition, or one device that loads slices in turn."""


@dataclass
class RunConfig(EngineConfig):
    """The keys that training and evaluation share."""

    runs_steps = True
    # [Division into partitions]
    data_parallel: int = 1
    """Replicas of the pipeline, each with its share of every mini-batch; needs engine=processes. Their number changes
    the last bits of the results."""
    # [Evaluation]
    eval_chunks: int | None = None
    """Micro-batches per mini-batch in evaluation; null: as many as `chunks`."""
    # [The step]
    precision: str = "fp32"
    """fp32, bf16 or fp16 (autocast; fp16 scales the loss)."""
    step_timeout: float | None = None
    """Abort a step that takes longer than this many seconds; null: never."""


@dataclass
class CostConfig(ModelConfig):
    """The keys that, besides the model and its division, decide the cost of a training step."""

    uses_loss = True
    # [Optimizer]
    optimizer: dict[str, Any] = field(default_factory=dict)
    """What updates the parameters; its state needs memory."""
    freeze: list[str] = field(default_factory=list)
    """Layers or parameters that training leaves as they are: names, prefixes or globs, such as [stem,layer1]."""
    # [The step]
    checkpoint: Any = "except_last"
    """Which micro-batches recompute activations: always, except_last, never, or a list with one mode per partition."""
    # [Division into partitions]
    device_memory: Any = None
    """Memory limit per device, such as 11GiB, that the balance must respect; null: no limit."""


@dataclass
class TrainConfig(RunConfig, CostConfig):
    trains = True
    # [Optimizer]
    lr_schedule: dict[str, Any] = field(default_factory=dict)
    """How the learning rate changes over the run."""
    clip_grad_norm: float | None = None
    """Clip gradients to this total norm; null: no clipping."""
    ema: float | None = None
    """Keep an exponential moving average of the weights with this decay, such as 0.999, and evaluate, save and export
    it; null: none."""
    # [Division into partitions]
    plan: AutoPlanConfig = field(default_factory=AutoPlanConfig)
    """Whether to search for the best balance, chunks, schedule and checkpoint mode first."""
    shard: str = "none"
    """What the replicas of data_parallel divide: none, or optimizer (each keeps and updates its share of the state)."""
    # [Keys]
    epochs: int = 3
    """Passes over the training data."""
    steps: int | None = None
    """Total number of steps; overrides `epochs`."""
    resume: str | None = None
    """Resume a run or one of its snapshots, given by path; `auto` resumes `run_dir` if it contains a run."""
    # [Evaluation]
    eval_every: int | None = None
    """Steps between evaluations, in addition to one after each epoch; null: none in between."""
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    """When to end a run that no longer improves."""
    # [The step]
    deferred_batch_norm: bool = False
    """Compute batch-norm statistics over the whole mini-batch instead of each micro-batch."""
    # [The run]
    seed: int = 0
    """Seed of all randomness in a run: initialization, data order, augmentation, dropout."""
    run_dir: str | None = None
    """Directory of the run; null: runs/<command>/<model>/<time>."""
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    """When to save the training state, and how many snapshots to keep."""
    reset_optimizer: bool = False
    """With `resume`: start with a fresh optimizer state instead of the saved one, which may be missing or damaged."""
    time_limit: str | None = None
    """Stop cleanly before this much time has passed, such as 90s, 30m, 2h or 1h30m; the run can be resumed."""
    # [Logging]
    logger: dict[str, Any] = field(default_factory=dict)
    """Where to send metrics besides metrics.jsonl."""
    log: LogConfig = field(default_factory=LogConfig)
    """What to log during the run."""


@dataclass
class SavedConfig(CommandConfig):
    """The keys of commands that use a snapshot."""

    run: str | None = None
    """The run directory whose best snapshot to use, with the settings it was trained with."""
    which: str | None = None
    """Which snapshot of `run`: best (of snapshot.monitor) or last; null: the best if there is one, else the last."""
    snapshot: str | None = None
    """A snapshot of a run, instead of `run`."""
    at: str | None = None
    """The former name of `which`; the next release will not know it."""


@dataclass
class TrainedConfig(RunConfig, SavedConfig):
    """The keys of commands that use trained weights."""

    uses_trained_weights = True
    weights: str | None = None
    """A file of weights (.safetensors, .pth), instead of `run`; give model and data as well."""


@dataclass
class EvalConfig(TrainedConfig):
    uses_loss = True
    split: str = "test"
    """Which samples to evaluate: test, train, or validation, the part that data.validation holds out."""
    seed: int = 0
    """Seed of the run, which decides the samples that data.validation holds out."""


@dataclass
class PredictConfig(TrainedConfig):
    input: Any = None
    """What to predict: a folder of images, an image, a pattern such as 'photos/*.jpg', or a list."""
    top: int = 3
    """How many of the likeliest classes to show for each input."""
    out: str | None = None
    """A CSV file for the predictions, or a new folder for the masks of a segmentation; null: stdout, and no masks."""


@dataclass
class GenerateConfig(TrainedConfig):
    prompt: str = ""
    """The text to continue, taken as it is; `-` reads it from stdin, without its last line break."""
    tokens: int = 50
    """How many tokens to generate, unless the text ends before."""
    temperature: float = 0.8
    """Below 1, likely tokens become likelier; above 1, all become more equal; 0 always takes the likeliest."""
    top_k: int | None = 40
    """Sample from this many of the likeliest tokens; null: from all."""
    seed: int = 0
    """Seed for sampling: the same seed gives the same text, however the model is split."""


@dataclass
class BalanceConfig(CostConfig):
    """gpipe balance"""


@dataclass
class ProfileConfig(EngineConfig, CostConfig):
    measure: bool = True
    """Run the layers and measure their time; false counts operations instead and needs no memory."""
    timeline: bool = False
    """Also run some pipelined steps and record every action: trace.json, a chart, and where time is lost."""
    steps: int = 3
    """How many steps timeline=true records, after two warm-up steps."""
    seconds: float = 3.0
    """How long to measure, in seconds; at least five runs."""
    sort: str = "order"
    """Sort rows by order (of the model), time (operations if nothing is measured) or memory."""
    top: int | None = 20
    """Number of rows to show; null: all."""
    run_dir: str | None = None
    """Directory of the profile; null: runs/<command>/<model>/<time>."""


@dataclass
class PlanConfig(CostConfig):
    plans = True
    plan: PlanSearchConfig = field(default_factory=PlanSearchConfig)
    """How long planning may take."""
    device: Any = None
    """Plan for another type of device with estimated costs: a name such as a100, or custom figures such as
    {flops:50e12,memory:24GiB,bandwidth:1e12,link:25e9}; null: measure on this machine."""
    precision: str = "fp32"
    """fp32, bf16 or fp16 (autocast), or with `device` tf32."""
    tensor_cores: bool = True
    """With `device`: whether matrix products use tensor cores where the device has them."""
    data_parallel: int = 1
    """With `device`: replicas of the pipeline, each with its share of the devices and of every mini-batch."""
    verify: bool = False
    """Run the best plans and print the error of the prediction."""
    top: int = 5
    """Number of plans to show."""
    page: str | None = None
    """An HTML file to write: all candidates by time and memory, the timeline of the best plan, and what limits it."""


@dataclass
class LaunchScriptConfig(TrainConfig):
    kind: str | None = None
    """What starts the run on each machine: slurm or torchrun; the first word after the command."""
    nodes: int | None = None
    """slurm: how many nodes."""
    hosts: list[str] = field(default_factory=list)
    """torchrun: names or addresses of all hosts, such as [node0,node1]; the first one holds the rendezvous."""
    gpus_per_node: int | None = None
    """GPUs of each node, each for one rank."""
    ranks_per_node: int | None = None
    """Instead of gpus_per_node: ranks of each node, on its CPU."""
    cpus_per_node: int | None = None
    """slurm: CPUs of each node; null: the job gets whole nodes."""
    requeue: int = 0
    """slurm: how often the job may go back into the queue until the run has finished."""
    port: int | None = None
    """Port of the rendezvous; null: 29500, or for slurm one that depends on the job."""
    time_limit: str | None = None
    """slurm: limit of the job, such as 4h; gpipe saves and stops before it. torchrun: as in gpipe train."""


@dataclass
class CheckConfig(CommandConfig):
    devices: Any = "auto"
    """auto (all accelerators, else the CPU), a number of devices, or a list such as [cpu,cpu] or [cuda:0,cuda:1]."""
    run_dir: str | None = None
    """Directory of the results; null: runs/<command>/<device>/<time>."""


@dataclass
class ReportConfig(CommandConfig):
    run: list[str] = field(default_factory=list)
    """The run directories, which need no key: gpipe report <directory> <directory>; several are compared."""
    out: str | None = None
    """The HTML file to write; null: report.html of the run, or comparison.html."""


@dataclass
class RunsConfig(CommandConfig):
    folder: str = "runs"
    """The folder whose runs to list, which needs no key: gpipe runs <directory>."""
    watch: bool = False
    """Refresh the table on the terminal until Ctrl-C; `--watch` is short for it."""


@dataclass
class ExportConfig(SavedConfig):
    format: str = "safetensors"
    """safetensors (a file), hf (a directory for from_pretrained) or peft (an adapter for PeftModel)."""
    out: str | None = None
    """The file or directory to write; null: model.safetensors."""


@dataclass
class CpConfig(CommandConfig):
    source: str | None = None
    """What to copy, which needs no key: <group>/<option>, such as recipe/digits, or run/<directory>."""
    target: str | None = None
    """The new file, or a folder for it, the word after the source."""


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
GROUPS = (*COMPONENT_GROUPS, "schedule", "plan")
