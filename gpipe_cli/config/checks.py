"""Checks ranges, choices and combinations of typed settings without torch, and reports all problems at once.

Checks that need the model (its number of layers) or the machine (its devices) happen where these are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpipe_cli.config import schema
from gpipe_cli.config.keys import list_options
from gpipe_cli.config.targets import add_current_folder, is_trusted
from gpipe_cli.config.words import ANY_CHARACTER
from gpipe_cli.errors import ConfigError, RunError, or_list
from gpipe_cli.plan.devices import PRECISIONS, device_problems, is_elsewhere
from gpipe_cli.report.formatting import hidden_character, no_hidden
from gpipe_cli.schedule import names, traits
from gpipe_cli.schedule.checkpoint import MODES
from gpipe_cli.schedule.own_orders import FILE, OWN_ORDERS, may_share_devices
from gpipe_cli.values import flatten, parse_bytes, parse_duration

CHOICES = {
    "precision": ("fp32", "bf16", "fp16"),
    "checkpoint": MODES,
    "shard": ("none", "optimizer"),
    "split": ("test", "train", "validation"),
    "sort": ("order", "time", "memory"),
    "at": ("best", "last"),
    "format": ("safetensors", "hf", "peft"),
    "kind": ("slurm", "torchrun"),
}
NO_CHOICE = {
    "shard=full": "replicas that also divide their parameters, as torch's fully_shard does, exchange them in every "
    "micro-batch, and wait forever where a short last batch gives them unequal numbers of micro-batches; use "
    "shard=optimizer, and more partitions to divide the parameters"
}
"""Why a value that somebody may expect is not one of the choices."""
MOST_RANKS = 1024
"""The limit on threads, workers and processes, above the cores of the largest machines and the GPUs of a large job."""
LARGEST_SEED = 2**63 - 1
AT_LEAST = {
    1: "chunks eval_chunks partitions data_parallel batch_size epochs steps eval_every log.every early_stop.patience "
    "snapshot.every snapshot.keep model.num_classes top tokens top_k nodes gpus_per_node ranks_per_node cpus_per_node "
    "port",
    0: "engine.max_restarts early_stop.min_delta seed data.seed temperature requeue seconds balance.seconds",
}
AT_MOST = {
    MOST_RANKS: "threads devices partitions data_parallel nodes gpus_per_node ranks_per_node",
    LARGEST_SEED: "seed",
    1000: "requeue",
    65535: "port",
}
PROCESSES = "gpipe_cli.engines.processes.build"
WITHOUT_FILES = {*schema.COMPONENT_GROUPS} - {"model", "data"}
"""Components that read no files."""


def check(settings: schema.CommandConfig) -> None:
    """Raise one ConfigError that names every problem."""
    if problems := list(_problems(settings)):
        raise ConfigError("; ".join(problems))
    for key in ("run", "snapshot") if isinstance(settings, schema.SavedConfig) else ():
        given = getattr(settings, key)
        if given is not None and not Path(given).is_dir():
            raise RunError(f"{key}={given}: no such directory")


def check_numbers(plain: Mapping[Any, Any]) -> None:
    """Reject whole numbers beyond 64 bits before anything converts them; they may be too long to print."""
    for key, value in flatten(plain, elements=True):
        if isinstance(value, int) and abs(value) > LARGEST_SEED:
            raise ConfigError(f"{key}: a whole number must be between -{LARGEST_SEED} and {LARGEST_SEED}")


def _problems(settings: schema.CommandConfig) -> Iterator[str]:
    plain = asdict(settings)
    flat = plain | dict(flatten(plain, elements=True))  # with mappings, which a key of any type may be given
    # torch itself decides about tf32, so a run has no such precision; only an estimate does.
    estimated = {"precision": PRECISIONS} if isinstance(settings, schema.PlanConfig) else {}
    yield from _ranges(flat)
    yield from _values(flat)
    yield from _choices(flat, CHOICES | estimated)
    for keys, problems in PROBLEMS.items():
        if isinstance(settings, keys):
            yield from problems(settings)


def _ranges(flat: Mapping[str, Any]) -> Iterator[str]:
    for key, value in flat.items():
        # bool is an int to Python, and nan is neither too small nor too large.
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        for least, keys in AT_LEAST.items():
            if number < least and key in keys.split():
                yield f"{key}={value}: must be at least {least}"
        for most, keys in AT_MOST.items():
            if number > most and key in keys.split():
                yield f"{key}={value}: must be at most {most}"
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value}: must be finite"


def _values(flat: Mapping[str, Any]) -> Iterator[str]:
    """Judge single keys that have a form of their own; null means none."""
    given = {key: value for key, value in flat.items() if value is not None}
    for key in ("clip_grad_norm", "step_timeout", "plan.budget", "plan.verify_budget"):
        if not given.get(key, 1) > 0:
            yield f"{key}={given[key]}: must be positive{'' if key.startswith('plan.') else ', or null for none'}"
    if not 0 < given.get("ema", 0.5) < 1:
        yield f"ema={given['ema']}: must be between 0 and 1, such as 0.999, or null for none"
    if given.get("out") == "":
        yield "out: give a path, or leave it out"
    threads = flat.get("threads", "auto")
    if threads != "auto" and not (_is_count(threads) and threads > 0):
        yield f"threads={threads}: must be auto or a whole number of at least 1"
    if parse_duration(given.get("time_limit", "1s")) is None:
        yield f"time_limit={given['time_limit']}: give a duration such as 90s, 30m, 2h or 1h30m"
    try:
        parse_bytes(given.get("device_memory", "1B"))
    except ValueError as error:
        yield f"device_memory={given['device_memory']}: {error}, or null for no limit"
    for key, value in given.items():
        may_name_file = key not in ANY_CHARACTER and key.partition(".")[0] not in WITHOUT_FILES
        if isinstance(value, str) and may_name_file and (hidden := hidden_character(value)):
            yield f"{key}: {no_hidden(hidden)}"


def _choices(flat: Mapping[str, Any], choices: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for key in filter(flat.__contains__, choices):
        given = flat[key]
        values = given if isinstance(given, list) else [given]
        wrong = [value for value in values if value not in choices[key]]
        # Null is the default of some keys; checkpoint takes values of any type.
        if wrong and (given is not None or key == "checkpoint"):
            yield f"{key}={given}: {NO_CHOICE.get(f'{key}={given}') or or_list(str(wrong[0]), choices[key])}"


def _model(settings: schema.ModelConfig) -> Iterator[str]:
    if wrong_schedule := _schedule(settings):
        yield wrong_schedule
    else:
        yield from _devices(settings)
    layers, partitions = settings.balance.get("layers"), settings.partitions
    if isinstance(layers, list) and not (layers and all(_is_count(count) and count > 0 for count in layers)):
        yield f"balance.layers={layers}: every entry must be a positive whole number"
    elif isinstance(layers, list) and partitions not in (None, len(layers)):
        yield f"partitions={partitions}: balance.layers={layers} makes {len(layers)} partitions"
    command = next(command for command, keys in schema.SCHEMAS.items() if type(settings) is keys)
    for group in schema.COMPONENT_GROUPS:
        if hasattr(settings, group) and not getattr(settings, group).get("_target_"):
            yield f"{group}: nothing chosen; give {group}=<option>, see `gpipe {command} --help`"


def _schedule(settings: schema.ModelConfig) -> str | None:
    """The problem with the schedule, if any. Imports your own module only if the command line allows it."""
    name, path = settings.schedule.name, settings.schedule.path
    if name == FILE and path is None:
        return "schedule.path: give the file with the order, such as schedule=file schedule.path=order.csv"
    if name != FILE and path is not None:
        return f"schedule.path={path}: has no effect with schedule={name}; add schedule=file, or leave it out"
    shipped = [option.name for option in list_options("schedule")]
    if name in shipped:
        return None
    if not is_trusted(f"{name}.", settings.allow):  # an allowed package may itself be the schedule
        root = name.partition(".")[0]
        yours = f"; for a package you trust add allow=[{root}] to the command line" if "." in name else ""
        return f"schedule.name={name}: {or_list(name, shipped)}{yours}"
    add_current_folder(settings.allow)
    try:
        traits(name)
    except ValueError as error:
        return f"schedule.name={name}: {error}"
    return None


def _devices(settings: schema.ModelConfig | schema.CheckConfig) -> Iterator[str]:
    devices, is_plan = settings.devices, isinstance(settings, schema.PlanConfig)
    if isinstance(devices, list):
        known = (
            isinstance(name, str) or _is_count(name) or (is_plan and is_elsewhere(name)) for name in devices
        )
        if not 1 <= len(devices) <= MOST_RANKS or not all(known):
            yield f"devices={devices}: expected a list of names or numbers such as [cpu,cpu] or [0,1]"
        elif isinstance(settings, schema.ModelConfig):
            yield from _partitions(settings, len(devices))
    elif devices != "auto" and not (_is_count(devices) and devices > 0):
        yield f"devices={devices}: must be auto, a number of devices or a list such as [cpu,cpu] or [cuda:0,cuda:1]"
    elif devices != "auto" and isinstance(settings, schema.ModelConfig):
        yield from _partitions(settings, devices)


def _partitions(settings: schema.ModelConfig, devices: int) -> Iterator[str]:
    partitions, replicas = settings.partitions, max(1, getattr(settings, "data_parallel", 1))
    own, given = devices // replicas, f"devices={settings.devices}"
    if devices % replicas:
        yield f"data_parallel={replicas}: {devices} devices ({given}) cannot be divided equally among the replicas"
        return
    if partitions is None or partitions == own:
        return
    if partitions < own or not may_share_devices(settings.schedule.name):
        gives = f"gives each of data_parallel={replicas} replicas {own}"
        if replicas == 1:
            sharing = "|".join((*names(several_per_device=True), *OWN_ORDERS))
            gives = f"gives {own} (only schedule={sharing} puts several partitions on one)"
        yield f"partitions={partitions}: each partition needs its own device, but {given} {gives}"


def _training(settings: schema.TrainConfig) -> Iterator[str]:
    continues = settings.resume not in (None, "auto")
    patience, min_delta = settings.early_stop.patience, settings.early_stop.min_delta
    if settings.optimizer.get("_target_") and "lr" not in settings.optimizer:
        yield "optimizer.lr: must be given; lr_schedule multiplies it"
    if settings.log.console and not (settings.log.partitions or settings.log.layers):
        yield "log.console=true: prints the lines of log.layers and log.partitions; set one of them to true"
    # A resumed run has the replicas of its run; its engine counts them.
    if settings.shard == "optimizer" and settings.data_parallel == 1 and not continues:
        yield (
            "shard=optimizer: divides the optimizer's state among replicas, and there is one; add engine=processes "
            "data_parallel=2, or set shard=none"
        )
    if patience is None and min_delta:
        yield f"early_stop.min_delta={min_delta:g}: has no effect without early_stop.patience; give both"
    if patience is not None and settings.snapshot.monitor is None:
        yield f"early_stop.patience={patience}: needs a metric; set snapshot.monitor=loss or another one"
    if (every := settings.snapshot.every) != "epoch" and not _is_count(every):
        yield f"snapshot.every={every}: must be a number of steps, or epoch"
    if settings.reset_optimizer and not continues:
        yield "reset_optimizer=true: needs resume=<a run or one of its snapshots>"
    if settings.resume == "auto" and settings.run_dir is None:
        yield "resume=auto: needs run_dir=<directory>, the same each time"
    if continues and settings.run_dir is not None:
        yield f"run_dir={settings.run_dir}: a resumed run continues in its own directory; leave it out"


def _plan(settings: schema.PlanConfig) -> Iterator[str]:
    device, devices = settings.device, settings.devices
    if device is None and not (isinstance(devices, list) and any(map(is_elsewhere, devices))):
        for key, default in (("tensor_cores", True), ("data_parallel", 1)):
            if (given := getattr(settings, key)) != default:
                yield f"{key}={given}: needs device=, since gpipe plan measures one pipeline here"
        if settings.precision == "tf32":
            yield "precision=tf32: needs device=; here torch.set_float32_matmul_precision decides"
        return
    yield from device_problems(device, devices)
    if settings.verify:
        what = f"devices={devices}" if device is None else f"device={device}"
        yield f"verify=true: this machine has no {what} to run plans on; leave one of them out"


def _launch_script(settings: schema.LaunchScriptConfig) -> Iterator[str]:
    """Judge what a file may set; `commands/launch_script` judges what only the command line gives."""
    if settings.engine.get("_target_") != PROCESSES:
        yield "engine: only engine=processes runs on several machines; give that, or leave it out"
    if (resume := settings.resume) not in (None, "auto"):
        yield f"resume={resume}: the script itself resumes the run in run_dir; give run_dir={resume} instead"


def _saved(settings: schema.SavedConfig) -> Iterator[str]:
    keys = [key for key in ("run", "snapshot", "weights") if hasattr(settings, key)]
    given = [key for key in keys if getattr(settings, key) is not None]
    if not given:
        use = {schema.EvalConfig: "evaluate", schema.ExportConfig: "export"}.get(type(settings), "use")
        others = "".join(f", or {key}=..." for key in keys[1:])
        yield f"run: give the run to {use}, run=runs/train/...{others}"
    elif len(given) > 1:
        yield f"{given[0]} and {given[1]} exclude each other; give one of them"
    elif settings.at is not None and settings.run is None:
        yield f"at={settings.at}: chooses among the snapshots of run=...; with {given[0]} leave it out"


def _predict(settings: schema.PredictConfig) -> Iterator[str]:
    given = settings.input if isinstance(settings.input, list) else [settings.input]
    if not given or None in given or "" in given:
        yield "input: give the images to predict, input=<folder>, a file, or a list of files"
    elif not all(isinstance(path, str) or _is_count(path) for path in given):
        yield f"input={settings.input}: must be a path or a list of paths"


def _profile(settings: schema.ProfileConfig) -> Iterator[str]:
    if settings.timeline and not settings.measure:
        yield "timeline=true: runs the model, but measure=false runs nothing; leave one of them out"


def _export(settings: schema.ExportConfig) -> Iterator[str]:
    if settings.format != "safetensors" and settings.out is None:
        yield f"format={settings.format}: writes a directory; give out=<directory>"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


PROBLEMS: Mapping[type[schema.CommandConfig], Callable[[Any], Iterator[str]]] = {
    schema.ModelConfig: _model,
    schema.CheckConfig: _devices,
    schema.TrainConfig: _training,
    schema.PlanConfig: _plan,
    schema.LaunchScriptConfig: _launch_script,
    schema.SavedConfig: _saved,
    schema.PredictConfig: _predict,
    schema.ProfileConfig: _profile,
    schema.ExportConfig: _export,
}
"""For each class of keys, what finds combinations that make no sense."""
