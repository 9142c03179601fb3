"""The text of `gpipe --help` and `gpipe <command> --help`, from the schema, the folders and the table below.

Imports neither Hydra nor torch.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from gpipe_cli import arguments
from gpipe_cli.config.keys import default_options, list_options, takes_recipes
from gpipe_cli.config.schema import config_keys
from gpipe_cli.config.words import CONFIG_MEANING, SCALE_KEY, SMALL

WIDTH = 110


@dataclass(frozen=True)
class Command:
    """A word after `gpipe`."""

    summary: str
    usage: str
    examples: tuple[str, ...]
    configured: bool = True
    """Whether Hydra composes a configuration for it; the others take plain words."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Keys of its own with their meanings, where the usage does not explain them."""


COMMANDS = {
    "train": Command(
        "train a model",
        "gpipe train [key=value ...] [flags]",
        (
            "gpipe train                                  # ResNet-18 on handwritten digits, two partitions",
            "gpipe train config=my.yaml epochs=5          # the keys of a file, and one of them changed",
            "gpipe train resume=<directory> epochs=6      # resume a stopped run, or train longer",
            "gpipe train -m chunks=2,4,8 jobs=2           # a sweep, two jobs at a time; the same line resumes it",
        ),
    ),
    "eval": Command(
        "evaluate a trained run",
        "gpipe eval run=<directory>|snapshot=<directory>|weights=<file> [key=value ...] [flags]",
        (
            "gpipe eval run=runs/train/resnet18/20260101-120000",
            "gpipe eval run=<directory> at=last split=train   # the last snapshot, on the training samples",
            "gpipe eval run=<directory> partitions=4      # divide it differently than in training",
            "gpipe eval run=<directory> --json            # one JSON document on stdout",
        ),
    ),
    "predict": Command(
        "predict classes, masks or numbers for images or tables with a trained model",
        "gpipe predict run=<directory>|snapshot=<directory>|weights=<file> input=<folder or files> [key=value ...]",
        (
            "gpipe predict run=<directory> input=photos              # a table, or CSV into a pipe",
            "gpipe predict run=<directory> input=photos out=predictions.csv",
            "gpipe predict weights=model.safetensors input=cat.jpg --json   # an exported file needs nothing else",
            "gpipe predict run=<directory> input=photos out=masks    # a segmentation: a PNG file per image",
        ),
    ),
    "generate": Command(
        "continue a text with a trained language model",
        "gpipe generate run=<directory>|snapshot=<directory>|weights=<file> [prompt=...] [key=value ...] [flags]",
        (
            'gpipe generate run=<directory> prompt="Shall I compare thee"',
            "gpipe generate run=<directory> prompt=- tokens=200 < text.txt   # read the prompt from stdin",
            "gpipe generate run=<directory> temperature=0   # always the likeliest token",
            'gpipe generate run=<directory> prompt="Once" partitions=4 --json   # divided differently, as JSON',
        ),
    ),
    "balance": Command(
        "divide a model's layers among partitions",
        "gpipe balance [--by time|size|params|uniform] [key=value ...] [flags]",
        (
            "gpipe balance --by time                      # measure every layer of the default model",
            "gpipe balance --by time model=resnet101 partitions=4 chunks=8",
            "gpipe balance --by params --json             # one JSON document on stdout",
            "gpipe balance --by time --json | jq -r .paste   # the command that trains with the balance",
        ),
    ),
    "profile": Command(
        "measure the time and memory of every layer",
        "gpipe profile [key=value ...] [flags]",
        (
            "gpipe profile                                # time and memory of each layer",
            "gpipe profile model=resnet101 sort=time top=10",
            "gpipe profile timeline=true partitions=4     # record pipelined steps: trace.json, lost time",
            "gpipe profile measure=false                  # run nothing: memory and FLOPs of a model of any size",
        ),
    ),
    "plan": Command(
        "search for the best balance, chunks, schedule and checkpoint mode",
        "gpipe plan [key=value ...] [flags]",
        (
            "gpipe plan                                   # the best plans for this machine, ready to paste",
            "gpipe plan verify=true                       # run the best plans, print the prediction's error",
            "gpipe plan model=gpt devices=4 device_memory=11GiB   # for four devices with a memory limit",
            "gpipe plan model=resnet101 device=a100 devices=8     # estimate for a machine you do not have",
        ),
    ),
    "launch-script": Command(
        "print a script that trains on several machines, by Slurm or torchrun",
        "gpipe launch-script slurm|torchrun [key=value ...] [--json]",
        (
            "gpipe launch-script slurm nodes=2 gpus_per_node=4 time_limit=4h requeue=20 run_dir=/shared/run1 > job.sh",
            "gpipe launch-script slurm nodes=2 gpus_per_node=4 time_limit=4h config=my.yaml | sbatch",
            "gpipe launch-script torchrun hosts=[node0,node1] gpus_per_node=4 run_dir=/shared/run1 > start.sh",
            "gpipe launch-script torchrun hosts=[node0] ranks_per_node=4 run_dir=/shared/run1 --json",
        ),
        keys={
            "nodes": "slurm: how many nodes.",
            "hosts": "torchrun: names or addresses of all hosts, such as [node0,node1]; the first one holds the "
            "rendezvous.",
            "gpus_per_node": "GPUs of each node, each for one rank.",
            "ranks_per_node": "Instead of gpus_per_node: ranks of each node, on its CPU.",
            "cpus_per_node": "slurm: CPUs of each node; without it the job gets whole nodes.",
            "requeue": "slurm: how often the job may go back into the queue until the run has finished; 0 by default.",
            "port": "Port of the rendezvous; by default 29500, or for slurm one that depends on the job.",
            "time_limit": "slurm: limit of the job; gpipe saves and stops before it. torchrun: as in gpipe train.",
        },
    ),
    "check": Command(
        "test this machine: devices, links, equal bits, overlap, ranks and speed-up",
        "gpipe check [devices=...] [run_dir=<directory>] [--json]",
        (
            "gpipe check                                  # all accelerators, or the CPU if there is none",
            "gpipe check devices=2                        # the first two",
            "gpipe check devices=[cuda:0,cuda:3] run_dir=checked",
            "gpipe check --json                           # one JSON document on stdout",
        ),
    ),
    "report": Command(
        "rebuild the report of a run, or compare several runs",
        "gpipe report <directory> [<directory> ...] [out=<file>] [--json]",
        (
            "gpipe report runs/train/resnet18/20260101-120000   # rebuild its report.html",
            "gpipe report <directory> <directory>               # compare runs in comparison.html",
            "gpipe report <directory> out=page.html",
            "gpipe report <directory> --json                    # one JSON document on stdout",
        ),
    ),
    "runs": Command(
        "list training runs with their state, step, metrics, age and size",
        "gpipe runs [<directory>] [--watch] [--json]",
        (
            "gpipe runs                                   # the runs below runs/, the latest last",
            "gpipe runs --watch                           # refresh the table until Ctrl-C",
            "gpipe runs experiments/sweep",
            "gpipe runs --json                            # one JSON document on stdout",
        ),
    ),
    "export": Command(
        "export the weights of a run to a file or directory that loads without gpipe",
        "gpipe export run=<directory>|snapshot=<directory> [at=best|last] [out=<path>] [format=<format>] [--json]",
        (
            "gpipe export run=runs/train/resnet18/20260101-120000   # format=safetensors",
            "gpipe export snapshot=<directory>/snapshots/step-00000100 out=early.safetensors",
            "gpipe export run=<directory> format=hf out=llama  # a directory for from_pretrained; needs model=hf",
            "gpipe export run=<directory> format=peft out=adapter  # for PeftModel.from_pretrained; needs model.lora",
        ),
    ),
    "ls": Command(
        "list models, datasets, recipes and other options",
        "gpipe ls [models|data|recipes|balance|schedules|engines|...] [--json]",
        ("gpipe ls", "gpipe ls models", "gpipe ls recipes", "gpipe ls models --json"),
        configured=False,
    ),
    "cp": Command(
        "copy a recipe, an option or the settings of a run to a file that you can change",
        "gpipe cp <group>/<option>|run/<directory> <file> [--json]",
        (
            "gpipe cp run/runs/train/resnet18/20260101-120000 my.yaml   # then: gpipe train config=my.yaml",
            "gpipe cp recipe/digits conf/recipes/mine.yaml",
            "gpipe train --config-dir conf recipe=mine    # train with your copy",
            "gpipe cp optimizer/sgd conf/optimizer/mine.yaml",
        ),
    ),
    "env": Command(
        "describe this machine, ready to paste into an issue",
        "gpipe env [--json]",
        ("gpipe env", "gpipe env --json", "gpipe env > env.txt", "gpipe env --help"),
        configured=False,
    ),
}


def _flags(command: str) -> dict[str, str]:
    return {
        f"{', '.join(flag.names)} {flag.metavar}".rstrip(): flag.help
        for flag in arguments.flags_of(command)
        if flag.help
    }


FLAGS = {
    **_flags(""),
    "-sc install=bash": 'set up tab completion, without a command: eval "$(gpipe -sc install=bash)"',
}


def overview() -> str:
    """gpipe --help"""
    commands = _table({name: command.summary for name, command in COMMANDS.items()})
    examples = [
        COMMANDS["train"].examples[0],
        "gpipe train model=resnet101 chunks=8         # another model, more micro-batches",
        "gpipe ls models                              # list all models",
        COMMANDS["train"].examples[3],
    ]
    parts = [
        "gpipe: train PyTorch models as a pipeline, from declarative configs.",
        "Usage: gpipe <command> [key=value ...] [flags]",
        _section("Commands", commands),
        _section("Examples", examples),
        *_configuration("train"),
        _section("Flags", _table(FLAGS)),
        "`gpipe <command> --help` describes a command. Tab completion, in ~/.bashrc: "
        'eval "$(gpipe -sc install=bash)"',
    ]
    return "\n\n".join(parts)


def command_help(name: str) -> str:
    """gpipe <command> --help"""
    command = COMMANDS[name]
    parts = [
        f"gpipe {name}: {command.summary}.",
        f"Usage: {command.usage}",
        _section("Examples", command.examples),
    ]
    parts += _configuration(name) if command.configured else []
    return "\n\n".join([*parts, _section("Flags", _table(_flags(name)))])


def _configuration(command: str) -> list[str]:
    sections = {
        "Groups (group=option; * marks the default)": _groups(command),
        "Keys (key=value)": _keys(command),
        "Keys of the default options": _component_keys(command),
    }
    return [_section(title, lines) for title, lines in sections.items() if lines]


def _groups(command: str) -> list[str]:
    """Each group with its meaning and its options; an asterisk marks the default."""
    chosen = default_options(command)
    rows: dict[str, str] = {}
    for field in config_keys(command):
        group = field.key.partition(".")[0]
        if group in chosen:
            names = [
                f"{option.name}*" if chosen[group].name == option.name else option.name
                for option in list_options(group)
            ]
            rows.setdefault(group, f"{field.meaning} Options: {', '.join(names)}.")
    if takes_recipes(command):
        recipes = {
            devices: [
                option.name for option in list_options("recipes") if ("devices" in option.facts) is devices
            ]
            for devices in (False, True)
        }
        rows["recipe"] = (
            f"A complete run. Tested on two CPU cores: {', '.join(recipes[False])}. Benchmarks of torchgpipe for eight "
            f"GPUs, not run by us: {', '.join(recipes[True])}."
        )
        small = [option.name for option in list_options(f"recipes/{SMALL}")]
        rows[SCALE_KEY] = f"full, or small to try a recipe on two CPU cores: {', '.join(small)}."
    return _table(rows)


def _keys(command: str) -> list[str]:
    """All keys except the first of each group, which `_groups` shows."""
    rows = {}
    groups = set(default_options(command))
    for field in config_keys(command):
        group = field.key.partition(".")[0]
        if group in groups:
            groups.remove(group)
        else:
            kind = " ".join(
                part for part in (field.type, f"= {field.default}" if field.default else "") if part
            )
            rows[f"{field.key}  {kind}".strip()] = field.meaning
    rows["config  str"] = CONFIG_MEANING
    return _table(rows)


def _component_keys(command: str) -> list[str]:
    """The keys of the default option of each group."""
    rows = {}
    for group, option in default_options(command).items():
        for key, (default, meaning) in option.keys.items():
            rows[f"{group}.{key}  = {default}"] = meaning
    return _table(rows)


def _section(title: str, lines: list[str] | tuple[str, ...]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])


def _table(rows: dict[str, str]) -> list[str]:
    """Two columns; the second wraps below itself."""
    left = max((len(name) for name in rows), default=0) + 2
    lines = []
    for name, text in rows.items():
        first, *more = textwrap.wrap(text, WIDTH - left - 2, break_on_hyphens=False) or [""]
        lines.append(f"{name:<{left}}{first}".rstrip())
        lines += [" " * left + line for line in more]
    return lines
