"""launch.json: the commands that started and resumed a run, and how its model is divided; the report shows both."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gpipe_cli.config.overrides import override_key
from gpipe_cli.config.schema import CostConfig, EngineConfig
from gpipe_cli.errors import RunError
from gpipe_cli.profiling.partition_memory import resident_memory
from gpipe_cli.run.build import RunParts
from gpipe_cli.run.components import traits_of_engine
from gpipe_cli.run.job import Job
from gpipe_cli.run.training_step import optimizer_factory
from gpipe_cli.safe_files import parse_json, read_regular
from gpipe_cli.training.run_directory import write_json
from gpipe_cli.values import parse_bytes

NAME = "launch.json"
MAX_BYTES = 16 * 2**20


def launch_of(
    settings: CostConfig,
    job: Job,
    parts: RunParts,
    activations: Sequence[int] | None = None,
    resumed: Path | None = None,
) -> dict[str, Any]:
    """activations: the bytes each partition saves for backward, if known; resumed: the directory of a resumed run."""
    limit = settings.device_memory
    has_timeline = isinstance(settings, EngineConfig) and traits_of_engine(settings).has_timeline
    before = [] if resumed is None else _earlier_commands(resumed)
    commands = before if before[-1:] == [job.line] else [*before, job.line]  # restarted ranks repeat it
    return {
        "command": job.command,
        "commands": commands,
        "allow": settings.allow,
        "device_memory": None if limit is None else parse_bytes(limit),
        "partitions": _rows(settings, parts, activations),
        "profile": _profile_command(commands, has_timeline=has_timeline),
    }


def write_launch(directory: Path, launch: Mapping[str, Any]) -> None:
    write_json(directory / NAME, launch)


def _earlier_commands(run: Path) -> list[str]:
    """The commands that started and resumed the run before."""
    path = run / NAME
    try:
        match parse_json(read_regular(path, MAX_BYTES, base=run)):
            case {"commands": list(lines)} if all(
                isinstance(line, str) and shlex.split(line) for line in lines
            ):
                return lines
        raise ValueError("it lists no commands")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: cannot be read: {error}; repair it, or remove it to resume without the earlier commands"
        ) from error


def _rows(settings: CostConfig, parts: RunParts, activations: Sequence[int] | None) -> list[dict[str, Any]]:
    rows = parts.partitions
    try:
        resident = resident_memory(parts.model, parts.partitioning.balance, optimizer_factory(settings))
    except Exception:  # noqa: BLE001 - an optimizer may reject the trial gradients, and still train
        return rows
    sizes: list[Mapping[str, Any]] = [asdict(partition) for partition in resident]
    if activations is None:
        sizes = [{name: size for name, size in row.items() if name != "activation_bytes"} for row in sizes]
    else:
        sizes = [{**row, "activation_bytes": saved} for row, saved in zip(sizes, activations, strict=True)]
    return [{**row, **own} for row, own in zip(rows, sizes, strict=True)]


def _profile_command(commands: Sequence[str], *, has_timeline: bool) -> str | None:
    """The command that records a step of the same pipeline; None for a recipe, which `gpipe profile` does not take.

    has_timeline: whether the run's engine can record its steps; otherwise the profile uses the default engine.
    """
    taken = {"engine", *(field.name for field in fields(CostConfig))}
    words: dict[str, str] = {}
    for line in commands:
        given = shlex.split(line)[2:]
        if any(word.startswith(("recipe=", "--config-")) for word in given):
            return None
        for word in given:
            path = override_key(word)
            if path.partition(".")[0] in taken:
                words[path] = word
    if not has_timeline:
        words = {path: word for path, word in words.items() if path.partition(".")[0] != "engine"}
    return shlex.join(["gpipe", "profile", "timeline=true", *words.values()])
