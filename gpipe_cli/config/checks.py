"""Judges the keys of a command without torch, and reports all problems at once.

A rule looks at the flat mapping of dotted keys and applies where its keys are, whatever the command. Checks that need
the model (its number of layers) or the machine (its devices) happen where these are known.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpipe_cli.config import schema
from gpipe_cli.config.keys import list_options
from gpipe_cli.config.targets import add_current_folder, is_trusted
from gpipe_cli.config.words import ANY_CHARACTER
from gpipe_cli.errors import ConfigError, DataError, GpipeError, RunError, or_list
from gpipe_cli.report.formatting import hidden_character, no_hidden
from gpipe_cli.schedule import names, traits
from gpipe_cli.schedule.action import MODES
from gpipe_cli.schedule.orders import CUSTOM, FILE, may_share_devices
from gpipe_cli.values import flatten, parse_bytes, parse_duration

CHOICES = {
    "precision": ("fp32", "bf16", "fp16"),
    "checkpoint": MODES,
    "shard": ("none", "optimizer"),
    "compile": ("none", "layers"),
    "split": ("test", "train", "validation"),
    "sort": ("order", "time", "memory"),
    "which": ("best", "last"),
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
MAX_RANKS = 1024
"""The limit on threads, workers and processes, above the cores of the largest machines and the GPUs of a large job."""
MAX_SEED = 2**63 - 1
PROCESSES = "gpipe_cli.engines.processes.build"
HUGGING_FACE = "gpipe_cli.models.hf.pretrained.build"
"""Of these models, `gpipe generate` runs a directory as it is."""
WORDS = (("resume", "auto"), ("data.tokenizer", "auto"))
"""Values that are words where another value is a path."""
WITHOUT_FILES = {*schema.COMPONENT_GROUPS} - {"model", "data"}
"""Components that read no files."""


IMAGE_FOLDER = "gpipe_cli.data.image_folder."
NO_DIRECTORY, NO_FILE = "no such directory", "no such file"
MISSING: Mapping[str, tuple[type[GpipeError], str]] = {
    "resume": (RunError, NO_DIRECTORY),
    "weights": (RunError, NO_FILE),
    "input": (DataError, "no such file or folder"),
    "model.path": (
        ConfigError,
        f"{NO_DIRECTORY}; gpipe downloads nothing: give a local directory with config.json and safetensors files",
    ),
    "model.weights": (RunError, NO_FILE),
    "data.path": (DataError, "cannot be read: no such file or directory"),
    "data.root": (DataError, "is not a folder; put a folder of images per class there"),
    "data.tokenizer": (
        ConfigError,
        "no such file or directory; gpipe downloads nothing, give a local tokenizer.json or its directory",
    ),
    "schedule.path": (ConfigError, NO_FILE),
}
"""What gpipe's own components read, and how to say that it is not there."""


def _number(value: object) -> float:
    """The value if it is a number, else nan, which is neither below nor above anything; to Python, true is 1."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _is_count(value: object, least: float = -math.inf) -> bool:
    return isinstance(value, int) and _number(value) >= least


RULES: Sequence[tuple[str, Callable[[Any], bool], str]] = (
    (
        "chunks eval_chunks partitions data_parallel batch_size epochs steps eval_every eval.every eval.batches "
        "log.every early_stop.patience snapshot.every snapshot.keep model.num_classes top tokens top_k nodes "
        "gpus_per_node ranks_per_node cpus_per_node port",
        lambda value: _number(value) < 1,
        "must be at least 1",
    ),
    (
        "engine.max_restarts early_stop.min_delta seed data.seed temperature requeue seconds balance.seconds",
        lambda value: _number(value) < 0,
        "must be at least 0",
    ),
    (
        "threads devices partitions data_parallel nodes gpus_per_node ranks_per_node",
        lambda value: _number(value) > MAX_RANKS,
        f"must be at most {MAX_RANKS}",
    ),
    ("requeue", lambda value: value > 1000, "must be at most 1000"),
    ("port", lambda value: value > 65535, "must be at most 65535"),
    ("plan.budget plan.verify_budget", lambda value: not value > 0, "must be positive"),
    ("clip_grad_norm step_timeout", lambda value: not value > 0, "must be positive, or null for none"),
    ("ema", lambda value: not 0 < value < 1, "must be between 0 and 1, such as 0.999, or null for none"),
    ("threads", lambda value: not _is_count(value, 1), "must be auto or a whole number of at least 1"),
    (
        "eval.every",
        lambda value: value is not None and not _is_count(value),
        "must be a number of steps, epoch, or null for none",
    ),
    ("snapshot.every", lambda value: not _is_count(value), "must be a number of steps, or epoch"),
    ("time_limit", lambda value: not parse_duration(value), "give a duration such as 90s, 30m, 2h or 1h30m"),
)
"""Keys, what is wrong with a value other than the default, and how to say it."""


def check(settings: schema.CommandConfig) -> None:
    """Raise one ConfigError that names every problem."""
    flat, defaults = (dict(flatten(asdict(each), inner=True)) for each in (settings, type(settings)()))
    # A default is right: above all null, where it means none.
    given = {key: value for key, value in flat.items() if value != defaults.get(key)}
    problems = [*_values(given), *_choices(given, is_plan="device" in flat), *_combinations(flat)]
    command = next(command for command, keys in schema.SCHEMAS.items() if type(settings) is keys)
    problems += [
        f"{group}: nothing chosen; give {group}=<option>, see `gpipe {command} --help`"
        for group in schema.COMPONENT_GROUPS
        if group in flat and not flat.get(f"{group}._target_")
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    for key in ("run", "snapshot"):
        if isinstance(folder := flat.get(key), str) and not Path(folder).is_dir():
            raise RunError(f"{key}={folder}: {NO_DIRECTORY}")


def check_files(settings: schema.CommandConfig) -> None:
    """Raise the error for the first file or folder that is not there: the one who reads it needs torch for that."""
    flat = dict(flatten(asdict(settings), inner=True))
    for key, (error, problem) in MISSING.items():
        group, value = key.partition(".")[0], flat.get(key)
        target = flat.get(f"{group}._target_", "gpipe_cli.")
        is_known = target.startswith(IMAGE_FOLDER if key == "data.root" else "gpipe_cli.")
        if not isinstance(value, str) or not is_known or (key, value) in WORDS:
            continue
        if key == "model.weights" and settings.uses_trained_weights:
            continue  # refused by name, whether the file exists or not
        # Path.exists raises for a name that is too long, which lexists takes for a missing one.
        there = Path(value).exists() or os.path.lexists(value)
        if not there and not glob.glob(value, recursive=True):  # noqa: PTH207 - any pattern
            raise error(f"{key}={value}: {'no file matches' if glob.has_magic(value) else problem}")


def check_numbers(plain: Mapping[Any, Any]) -> None:
    """Reject whole numbers beyond 64 bits before anything converts them; they may be too long to print."""
    for key, value in flatten(plain, inner=True):
        if isinstance(value, int) and abs(value) > MAX_SEED:
            raise ConfigError(f"{key}: a whole number must be between -{MAX_SEED} and {MAX_SEED}")


def _values(given: Mapping[str, Any]) -> Iterator[str]:
    """Judge each value for itself."""
    for keys, is_wrong, problem in RULES:
        for key in keys.split():
            if key in given and is_wrong(given[key]):
                yield f"{key}={given[key]}: {problem}"
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value}: must be finite"
        may_name_file = key not in ANY_CHARACTER and key.partition(".")[0] not in WITHOUT_FILES
        if isinstance(value, str) and may_name_file and (hidden := hidden_character(value)):
            yield f"{key}: {no_hidden(hidden)}"
    if given.get("out") == "":
        yield "out: give a path, or remove it"
    try:
        parse_bytes(given.get("device_memory", "1B"))
    except ValueError as error:
        yield f"device_memory={given['device_memory']}: {error}, or null for no limit"


def _choices(given: Mapping[str, Any], *, is_plan: bool) -> Iterator[str]:
    for key in filter(given.__contains__, CHOICES):
        value = given[key]
        # torch itself decides about tf32, so a run has no such precision; only an estimate does.
        choices = ("fp32", "tf32", "bf16", "fp16") if key == "precision" and is_plan else CHOICES[key]
        if wrong := [each for each in (value if isinstance(value, list) else [value]) if each not in choices]:
            yield f"{key}={value}: {NO_CHOICE.get(f'{key}={value}') or or_list(str(wrong[0]), choices)}"


def _combinations(flat: Mapping[str, Any]) -> Iterator[str]:
    """Judge keys that depend on each other."""
    if "schedule.name" in flat and (wrong_schedule := _schedule(flat)):
        yield wrong_schedule
    elif "devices" in flat:
        yield from _devices(flat)
    layers, partitions = flat.get("balance.layers"), flat.get("partitions")
    if isinstance(layers, list) and not (layers and all(_is_count(count, 1) for count in layers)):
        yield f"balance.layers={layers}: every entry must be a positive whole number"
    elif isinstance(layers, list) and partitions not in (None, len(layers)):
        yield f"partitions={partitions}: balance.layers={layers} makes {len(layers)} partitions"
    for key in ("timeline", "kernels"):
        if flat.get(key) and not flat["measure"]:
            yield f"{key}=true: runs the model, but measure=false runs nothing; remove one of them"
    if "device" in flat:
        yield from _plan(flat)
    if "epochs" in flat:
        yield from _training(flat)
    if "which" in flat:
        yield from _saved(flat)


def _schedule(flat: Mapping[str, Any]) -> str | None:
    """The problem with the schedule, if any. Imports a custom schedule only if the command line allows it."""
    name, path, allow = flat["schedule.name"], flat["schedule.path"], flat["allow"]
    if name == FILE and path is None:
        return "schedule.path: give the file with the order, such as schedule=file schedule.path=order.csv"
    if name != FILE and path is not None:
        return f"schedule.path={path}: has no effect with schedule={name}; add schedule=file, or remove it"
    shipped = [option.name for option in list_options("schedule")]
    if name in shipped:
        return None
    if not is_trusted(f"{name}.", allow):  # an allowed package may itself be the schedule
        root = name.partition(".")[0]
        yours = f"; for a package you trust add 'allow=[{root}]' to the command line" if "." in name else ""
        return f"schedule.name={name}: {or_list(name, shipped)}{yours}"
    add_current_folder(allow)
    try:
        traits(name)
    except ValueError as error:
        return f"schedule.name={name}: {error}"
    return None


def _devices(flat: Mapping[str, Any]) -> Iterator[str]:
    devices, partitions = flat["devices"], flat.get("partitions")
    replicas = max(1, flat.get("data_parallel", 1))
    if devices == "auto":
        return
    if isinstance(devices, list):
        is_plan = "device" in flat  # which also takes the figures of a device
        known = (
            isinstance(name, str) or _is_count(name) or (is_plan and isinstance(name, Mapping))
            for name in devices
        )
        if not 1 <= len(devices) <= MAX_RANKS or not all(known):
            yield f"devices={devices}: expected a list of names or numbers such as [cpu,cpu] or [0,1]"
            return
    elif not _is_count(devices, 1):
        yield f"devices={devices}: must be auto, a number of devices or a list such as [cpu,cpu] or [cuda:0,cuda:1]"
        return
    count, given = len(devices) if isinstance(devices, list) else devices, f"devices={devices}"
    own = count // replicas
    if count % replicas:
        yield f"data_parallel={replicas}: {count} devices ({given}) cannot be divided equally among the replicas"
    elif partitions is not None and (
        partitions < own or (partitions > own and not may_share_devices(flat["schedule.name"]))
    ):
        gives = f"gives each of data_parallel={replicas} replicas {own}"
        if replicas == 1:
            sharing = "|".join((*names(several_per_device=True), *CUSTOM))
            gives = f"gives {own} (only schedule={sharing} puts several partitions on one)"
        yield f"partitions={partitions}: each partition needs its own device, but {given} {gives}"


def _plan(flat: Mapping[str, Any]) -> Iterator[str]:
    # Late: no other command needs the table of devices.
    from gpipe_cli.plan.device_table import device_problems, is_elsewhere

    device, devices = flat["device"], flat["devices"]
    if device is None and not (isinstance(devices, list) and any(map(is_elsewhere, devices))):
        for key, default in (("tensor_cores", True), ("data_parallel", 1)):
            if flat[key] != default:
                yield f"{key}={flat[key]}: needs device=, since gpipe plan measures one pipeline here"
        if flat["precision"] == "tf32":
            yield "precision=tf32: needs device=; here torch.set_float32_matmul_precision decides"
        return
    yield from device_problems(device, devices)
    if flat["verify"]:
        what = f"devices={devices}" if device is None else f"device={device}"
        yield f"verify=true: this machine has no {what} to run plans on; remove one of them"


def _training(flat: Mapping[str, Any]) -> Iterator[str]:
    resume, run_dir = flat["resume"], flat["run_dir"]
    patience, min_delta = flat["early_stop.patience"], flat["early_stop.min_delta"]
    continues = resume not in (None, "auto")
    if flat.get("optimizer._target_") and "optimizer.lr" not in flat:
        yield "optimizer.lr: must be given; lr_schedule multiplies it"
    if flat["log.console"] and not (flat["log.partitions"] or flat["log.layers"]):
        yield "log.console=true: prints the lines of log.layers and log.partitions; set one of them to true"
    # A resumed run has the replicas of its run; its engine counts them.
    if flat["shard"] == "optimizer" and flat["data_parallel"] == 1 and not continues:
        yield (
            "shard=optimizer: divides the optimizer's state among replicas, and there is one; add engine=processes "
            "data_parallel=2, or set shard=none"
        )
    if patience is None and min_delta:
        yield f"early_stop.min_delta={min_delta:g}: has no effect without early_stop.patience; give both"
    if patience is not None and flat["snapshot.monitor"] is None:
        yield f"early_stop.patience={patience}: needs a metric; set snapshot.monitor=loss or another one"
    if flat["eval.every"] is None:
        unused = ("eval.batches", "eval_every", "eval_chunks", "early_stop.patience", "snapshot.monitor")
        for key in (*unused, "log.predictions"):
            if flat[key] not in (None, False, "loss"):
                yield f"{key}={flat[key]}: needs evaluations, and eval=none leaves them out; remove one of them"
    elif flat["eval.every"] != "epoch" and flat["eval_every"] is not None:
        yield f"eval_every={flat['eval_every']}: is the former form of eval.every; set it to null"
    if flat["reset_optimizer"] and not continues:
        yield "reset_optimizer=true: needs resume=<a run or one of its snapshots>"
    if resume == "auto" and run_dir is None:
        yield "resume=auto: needs run_dir=<directory>, the same each time"
    if continues and run_dir is not None:
        yield f"run_dir={run_dir}: a resumed run continues in its own directory; remove it"
    # Of gpipe launch-script, what a file may set; `commands/launch_script` judges what only the command line gives.
    if "kind" in flat and flat.get("engine._target_") != PROCESSES:
        yield "engine: only engine=processes runs on several machines; give that, or remove it"
    if "kind" in flat and continues:
        yield f"resume={resume}: the script itself resumes the run in run_dir; give run_dir={resume} instead"


def _saved(flat: Mapping[str, Any]) -> Iterator[str]:
    keys = [key for key in ("run", "snapshot", "weights") if key in flat]
    given = [key for key in keys if flat[key] is not None]
    if not given and not ("prompt" in flat and flat["model._target_"] == HUGGING_FACE):
        use = "evaluate" if "split" in flat else "export" if "format" in flat else "use"
        others = "".join(f", or {key}=..." for key in keys[1:])
        yield f"run: give the run to {use}, run=runs/train/...{others}"
    elif len(given) > 1:
        yield f"{given[0]} and {given[1]} exclude each other; give one of them"
    elif flat["which"] is not None and flat["at"] is not None:
        yield "which and at are two names of one key; give which"
    elif (which := flat["which"] or flat["at"]) is not None and flat["run"] is None:
        yield f"which={which}: chooses among the snapshots of run=...; with {given[0]} remove it"
    if flat.get("merge") and flat["out"] is None:
        yield "merge=true: writes a directory; give out=<directory>"
    if flat.get("merge") and flat["format"] == "peft":
        yield "merge=true: writes the whole model, and format=peft only its adapter; remove one of them"
    if flat.get("format") in ("hf", "peft") and flat["out"] is None:
        yield f"format={flat['format']}: writes a directory; give out=<directory>"
    if "input" in flat:
        paths = flat["input"] if isinstance(flat["input"], list) else [flat["input"]]
        if not paths or None in paths or "" in paths:
            yield "input: give the images to predict, input=<folder>, a file, or a list of files"
        elif not all(isinstance(path, str) or _is_count(path) for path in paths):
            yield f"input={flat['input']}: must be a path or a list of paths"
