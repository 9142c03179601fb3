"""Checks ranges, choices and combinations of typed settings without torch, and reports all problems at once.

Checks that need the model (its number of layers) or the machine (its devices) happen where these are known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpipe_cli.config.keys import list_options
from gpipe_cli.config.schema import (
    COMPONENT_GROUPS,
    SCHEMAS,
    CheckConfig,
    CommandConfig,
    CostConfig,
    CpConfig,
    EvalConfig,
    ExportConfig,
    LaunchScriptConfig,
    ModelConfig,
    PlanConfig,
    PredictConfig,
    ProfileConfig,
    ReportConfig,
    RunConfig,
    SavedConfig,
    TrainConfig,
)
from gpipe_cli.config.targets import add_current_folder, allows_module
from gpipe_cli.config.words import ANY_CHARACTER
from gpipe_cli.errors import ConfigError, RunError, or_list
from gpipe_cli.plan.devices import DEVICES, PRECISIONS, is_elsewhere
from gpipe_cli.report.formatting import hidden_character, no_hidden
from gpipe_cli.schedule import names, traits
from gpipe_cli.schedule.checkpoint import MODES
from gpipe_cli.schedule.own_orders import FILE, OWN_ORDERS, may_share_devices
from gpipe_cli.values import flatten, parse_bytes, parse_duration

CHOICES = {
    "precision": ("fp32", "bf16", "fp16"),
    "shard": ("none", "optimizer"),
    "split": ("test", "train", "validation"),
    "sort": ("order", "time", "memory"),
    "at": ("best", "last"),
    "format": ("safetensors", "hf", "peft"),
    "kind": ("slurm", "torchrun"),
}
_AT_LEAST_1 = (
    *("chunks", "eval_chunks", "partitions", "data_parallel", "batch_size", "epochs", "steps"),
    *("eval_every", "log.every", "early_stop.patience", "snapshot.every", "snapshot.keep"),
    *("model.num_classes", "top", "tokens", "top_k"),
    *("nodes", "gpus_per_node", "ranks_per_node", "cpus_per_node", "port"),
)
_AT_LEAST_0 = (
    *("engine.max_restarts", "early_stop.min_delta", "seed", "data.seed", "temperature", "requeue"),
    *("seconds", "balance.seconds"),
)
AT_LEAST = dict.fromkeys(_AT_LEAST_1, 1) | dict.fromkeys(_AT_LEAST_0, 0)
MOST_RANKS = 1024
"""The limit on threads, workers and processes, above the cores of the largest machines and the GPUs of a large job."""
AT_MOST = {"requeue": 1000, "port": 65535} | dict.fromkeys(
    ("threads", "devices", "partitions", "data_parallel", "nodes", "gpus_per_node", "ranks_per_node"),
    MOST_RANKS,
)
POSITIVE = ("clip_grad_norm", "step_timeout", "plan.budget", "plan.verify_budget")
LARGEST_SEED = 2**63 - 1
PROCESSES = "gpipe_cli.engines.processes.build"
SHORTEST_JOB = 300
"""Seconds of the shortest Slurm job: gpipe needs some of them to save and stop."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def check(settings: CommandConfig) -> None:
    """Raise one ConfigError that names every problem."""
    problems = list(_problems(settings))
    if problems:
        raise ConfigError("; ".join(problems))
    for key in ("run", "snapshot") if isinstance(settings, SavedConfig) else ():
        given = getattr(settings, key)
        if given is not None and not Path(given).is_dir():
            raise RunError(f"{key}={given}: no such directory")


def check_numbers(plain: Mapping[Any, Any]) -> None:
    """Reject whole numbers beyond 64 bits before anything converts them; they may be too long to print."""
    for key, value in flatten(plain, elements=True):
        if isinstance(value, int) and abs(value) > LARGEST_SEED:
            raise ConfigError(f"{key}: a whole number must be between -{LARGEST_SEED} and {LARGEST_SEED}")


def _problems(settings: CommandConfig) -> Iterator[str]:
    flat = dict(flatten(asdict(settings), elements=True))
    yield from _values(flat)
    # torch itself decides about tf32, so a run has no such precision; only an estimate does.
    if isinstance(settings, PlanConfig) and settings.precision not in CHOICES["precision"]:
        if settings.precision not in PRECISIONS:
            yield f"precision={settings.precision}: {or_list(str(settings.precision), PRECISIONS)}"
        yield from _choices({**flat, "precision": None})
    else:
        yield from _choices(flat)
    if isinstance(settings, ModelConfig):
        yield from _model(settings)
    if isinstance(settings, CheckConfig):
        yield from _devices(settings)
    if isinstance(settings, ProfileConfig) and settings.timeline and not settings.measure:
        yield "timeline=true: runs the model, but measure=false runs nothing; leave one of them out"
    if isinstance(settings, TrainConfig):
        if settings.optimizer.get("_target_") and "lr" not in settings.optimizer:
            yield "optimizer.lr: must be given; lr_schedule multiplies it"
        if settings.log.console and not (settings.log.partitions or settings.log.layers):
            yield "log.console=true: prints the lines of log.layers and log.partitions; set one of them to true"
        # A resumed run has the replicas of its run; its engine counts them.
        if (
            settings.shard == "optimizer"
            and settings.data_parallel == 1
            and settings.resume in (None, "auto")
        ):
            yield (
                "shard=optimizer: divides the optimizer's state among replicas, and there is one; add engine=processes "
                "data_parallel=2, or set shard=none"
            )
        yield from _resuming(settings)
    if isinstance(settings, PlanConfig):
        yield from _planned_devices(settings)
    if isinstance(settings, SavedConfig):
        yield from _weights(settings)
    if isinstance(settings, PredictConfig):
        yield from _prediction(settings)
    if isinstance(settings, ExportConfig) and settings.format != "safetensors" and settings.out is None:
        yield f"format={settings.format}: writes a directory; give out=<directory>"
    if isinstance(settings, ReportConfig) and not settings.run:
        yield "run: give a run directory: gpipe report runs/train/...; give several to compare them"
    if isinstance(settings, CpConfig) and (settings.source is None or settings.target is None):
        yield "give what to copy and the new file: gpipe cp recipe/digits conf/recipes/mine.yaml"
    if isinstance(settings, LaunchScriptConfig):
        yield from _launch(settings)


def _model(settings: ModelConfig) -> Iterator[str]:
    if wrong_schedule := _schedule(settings):
        yield wrong_schedule
    else:
        yield from _devices(settings)
    yield from _balance(settings)
    if isinstance(settings, CostConfig):
        yield from _memory(settings)
        yield from _checkpoint(settings)
    for group in COMPONENT_GROUPS:
        if hasattr(settings, group) and not getattr(settings, group).get("_target_"):
            yield f"{group}: nothing chosen; give {group}=<option>, see `gpipe {_command(settings)} --help`"


def _weights(settings: SavedConfig) -> Iterator[str]:
    keys = [key for key in ("run", "snapshot", "weights") if hasattr(settings, key)]
    given = [key for key in keys if getattr(settings, key) is not None]
    if not given:
        use = {EvalConfig: "evaluate", ExportConfig: "export"}.get(type(settings), "use")
        others = "".join(f", or {key}=..." for key in keys[1:])
        yield f"run: give the run to {use}, run=runs/train/...{others}"
    elif len(given) > 1:
        yield f"{given[0]} and {given[1]} exclude each other; give one of them"
    elif settings.at is not None and settings.run is None:
        yield f"at={settings.at}: chooses among the snapshots of run=...; with {given[0]} leave it out"


def _launch(settings: LaunchScriptConfig) -> Iterator[str]:
    hosts, by_slurm = settings.hosts, settings.kind == "slurm"
    if settings.kind is None:
        yield "kind: give the kind of script first, slurm or torchrun: gpipe launch-script slurm nodes=2 ..."
    if settings.engine.get("_target_") != PROCESSES:
        yield "engine: only engine=processes runs on several machines; give that, or leave it out"
    if (settings.gpus_per_node is None) == (settings.ranks_per_node is None):
        yield (
            "give one of gpus_per_node=<number>, with a rank on each GPU, and ranks_per_node=<number>, with ranks on "
            "the CPU"
        )
    if by_slurm and settings.nodes is None:
        yield "nodes: give nodes=<number>"
    if settings.kind == "torchrun" and not (hosts and all(map(_HOST.fullmatch, hosts))):
        yield f"hosts={hosts}: give the names or IPv4 addresses of all hosts, such as [node0,node1]"
    if len({*hosts}) < len(hosts):
        yield f"hosts={hosts}: names a host twice; give ranks_per_node for several ranks on one"
    if settings.resume not in (None, "auto"):
        yield (
            f"resume={settings.resume}: the script itself resumes the run in run_dir; give run_dir={settings.resume} "
            "instead"
        )
    elif settings.run_dir is None:
        yield "run_dir: give run_dir=<directory>, on a disk that all machines share"
    if by_slurm and (parse_duration(settings.time_limit or "") or 0) < SHORTEST_JOB:
        yield "time_limit: give the time limit of the Slurm job, at least 5m: time_limit=4h"


def _prediction(settings: PredictConfig) -> Iterator[str]:
    given = settings.input if isinstance(settings.input, list) else [settings.input]
    if not given or None in given or "" in given:
        yield "input: give the images to predict, input=<folder>, a file, or a list of files"
    elif not all(isinstance(path, str | int) and not isinstance(path, bool) for path in given):
        yield f"input={settings.input}: must be a path or a list of paths"


def _values(flat: Mapping[str, Any]) -> Iterator[str]:
    for key, least in AT_LEAST.items():
        if isinstance(flat.get(key), int | float) and flat[key] < least:
            yield f"{key}={flat[key]}: must be at least {least}"
    for key, most in AT_MOST.items():
        if _is_count(flat.get(key)) and flat[key] > most:
            yield f"{key}={flat[key]}: must be at most {most}"
    for key in POSITIVE:
        if flat.get(key) is not None and not flat[key] > 0:
            yield f"{key}={flat[key]}: must be positive{'' if key.startswith('plan.') else ', or null for none'}"
    if flat.get("seed", 0) > LARGEST_SEED:
        yield f"seed={flat['seed']}: must be at most {LARGEST_SEED}"
    if flat.get("ema") is not None and not 0 < flat["ema"] < 1:
        yield f"ema={flat['ema']}: must be between 0 and 1, such as 0.999, or null for none"
    if flat.get("out") == "":
        yield "out: give a path, or leave it out"
    threads = flat.get("threads", "auto")
    if threads != "auto" and (not _is_count(threads) or threads < 1):
        yield f"threads={threads}: must be auto or a whole number of at least 1"
    for key, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value}: must be finite"
        if isinstance(value, str) and _may_name_file(key) and (hidden := hidden_character(value)):
            yield f"{key}: {no_hidden(hidden)}"


def _may_name_file(key: str) -> bool:
    """Of the components, only models and data read files."""
    group = key.partition(".")[0]
    return key not in ANY_CHARACTER and (group in ("model", "data") or group not in COMPONENT_GROUPS)


def _choices(flat: Mapping[str, Any]) -> Iterator[str]:
    for key, choices in CHOICES.items():
        if (key, flat.get(key)) == ("shard", "full"):
            yield (
                "shard=full: replicas that also divide their parameters, as torch's fully_shard does, exchange them in "
                "every micro-batch, and wait forever where a short last batch gives them unequal numbers of "
                "micro-batches; use shard=optimizer, and more partitions to divide the parameters"
            )
        elif flat.get(key) is not None and flat[key] not in choices:
            yield f"{key}={flat[key]}: {or_list(str(flat[key]), choices)}"


def _schedule(settings: ModelConfig) -> str | None:
    """The problem with the schedule, if any. Imports your own module only if the command line allows it."""
    name, path = settings.schedule.name, settings.schedule.path
    if name == FILE and path is None:
        return "schedule.path: give the file with the order, such as schedule=file schedule.path=order.csv"
    if name != FILE and path is not None:
        return f"schedule.path={path}: has no effect with schedule={name}; add schedule=file, or leave it out"
    shipped = [option.name for option in list_options("schedule")]
    if name in shipped:
        return None
    if not allows_module(name, settings.allow):
        root = name.partition(".")[0]
        yours = f"; for a package you trust add allow=[{root}] to the command line" if "." in name else ""
        return f"schedule.name={name}: {or_list(name, shipped)}{yours}"
    add_current_folder(settings.allow)
    try:
        traits(name)
    except ValueError as error:
        return f"schedule.name={name}: {error}"
    return None


def _devices(settings: ModelConfig | CheckConfig) -> Iterator[str]:
    devices = settings.devices
    if devices == "auto":
        return
    if isinstance(devices, list):
        known = (
            isinstance(device, str) or _is_count(device) or _is_planned(settings, device)
            for device in devices
        )
        if not devices or not all(known) or len(devices) > MOST_RANKS:
            yield f"devices={devices}: expected a list of names or numbers such as [cpu,cpu] or [0,1]"
        elif isinstance(settings, ModelConfig):
            yield from _partitions_per_device(settings, len(devices))
    elif not _is_count(devices) or devices < 1:
        yield f"devices={devices}: must be auto, a number of devices or a list such as [cpu,cpu] or [cuda:0,cuda:1]"
    elif isinstance(settings, ModelConfig):
        yield from _partitions_per_device(settings, devices)


def _is_planned(settings: CommandConfig, device: object) -> bool:
    return isinstance(settings, PlanConfig) and is_elsewhere(device)


def _partitions_per_device(settings: ModelConfig, devices: int) -> Iterator[str]:
    partitions, several = settings.partitions, may_share_devices(settings.schedule.name)
    replicas = settings.data_parallel if isinstance(settings, RunConfig | PlanConfig) else 1
    if replicas > 1 and devices % replicas:
        yield (
            f"data_parallel={replicas}: {devices} devices (devices={settings.devices}) cannot be divided equally among "
            "the replicas"
        )
        return
    per_replica = devices // max(1, replicas)
    if partitions is None or partitions == per_replica or (several and partitions > per_replica):
        return
    if replicas > 1:
        yield (
            f"partitions={partitions}: each partition needs its own device, but devices={settings.devices} gives each "
            f"of data_parallel={replicas} replicas {per_replica}"
        )
        return
    yield (
        f"partitions={partitions}: each partition needs its own device, but devices={settings.devices} gives {devices} "
        f"(only schedule={'|'.join((*names(several_per_device=True), *OWN_ORDERS))} puts several partitions on one)"
    )


def _balance(settings: ModelConfig) -> Iterator[str]:
    layers = settings.balance.get("layers")
    if not isinstance(layers, list):
        return
    if not layers or not all(_is_count(count) and count > 0 for count in layers):
        yield f"balance.layers={layers}: every entry must be a positive whole number"
    elif settings.partitions is not None and settings.partitions != len(layers):
        yield f"partitions={settings.partitions}: balance.layers={layers} makes {len(layers)} partitions"


def _memory(settings: CostConfig) -> Iterator[str]:
    if settings.device_memory is not None:
        try:
            parse_bytes(settings.device_memory)
        except ValueError as error:
            yield f"device_memory={settings.device_memory}: {error}, or null for no limit"


def _checkpoint(settings: CostConfig) -> Iterator[str]:
    given = settings.checkpoint
    for mode in given if isinstance(given, list) else [given]:
        if mode not in MODES:
            yield f"checkpoint={given}: {or_list(str(mode), MODES)}"
            return


def _planned_devices(settings: PlanConfig) -> Iterator[str]:
    device, devices = settings.device, settings.devices
    listed = isinstance(devices, list) and any(map(is_elsewhere, devices))
    if device is None and not listed:
        for key, default in (("tensor_cores", True), ("data_parallel", 1)):
            if (given := getattr(settings, key)) != default:
                yield f"{key}={given}: needs device=, since gpipe plan measures one pipeline here"
        if settings.precision == "tf32":
            yield "precision=tf32: needs device=; here torch.set_float32_matmul_precision decides"
        return
    if isinstance(device, str) and device not in DEVICES:
        yield f"device={device}: unknown device; {or_list(device.lower(), DEVICES)}"
    elif device is not None and not isinstance(device, str | dict):
        yield f"device={device}: must be a name such as a100, or figures such as {{flops:50e12,memory:24GiB,...}}"
    if device is None and (others := [other for other in devices if not is_elsewhere(other)]):
        yield (
            f"devices={devices}: devices of this machine and others cannot be mixed, and {others[0]} is none of "
            f"{', '.join(sorted(DEVICES))}"
        )
    if device is not None and not _is_count(devices):
        yield f"devices={devices}: give the number of devices for device={device}, such as devices=8"
    if settings.verify:
        what = f"devices={devices}" if device is None else f"device={device}"
        yield f"verify=true: this machine has no {what} to run plans on; leave one of them out"


def _resuming(settings: TrainConfig) -> Iterator[str]:
    patience, min_delta = settings.early_stop.patience, settings.early_stop.min_delta
    if patience is None and min_delta:
        yield f"early_stop.min_delta={min_delta:g}: has no effect without early_stop.patience; give both"
    if patience is not None and settings.snapshot.monitor is None:
        yield f"early_stop.patience={patience}: needs a metric; set snapshot.monitor=loss or another one"
    every = settings.snapshot.every
    if every != "epoch" and not _is_count(every):
        yield f"snapshot.every={every}: must be a number of steps, or epoch"
    if settings.time_limit is not None and parse_duration(settings.time_limit) is None:
        yield f"time_limit={settings.time_limit}: give a duration such as 90s, 30m, 2h or 1h30m"
    if settings.reset_optimizer and settings.resume in (None, "auto"):
        yield "reset_optimizer=true: needs resume=<a run or one of its snapshots>"
    if settings.resume == "auto" and settings.run_dir is None:
        yield "resume=auto: needs run_dir=<directory>, the same each time"
    elif settings.resume not in (None, "auto") and settings.run_dir is not None:
        yield f"run_dir={settings.run_dir}: a resumed run continues in its own directory; leave it out"


def _command(settings: ModelConfig) -> str:
    return next(command for command, schema in SCHEMAS.items() if type(settings) is schema)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
