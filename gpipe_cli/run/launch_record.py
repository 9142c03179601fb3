"""launch.json: how a run was started, gone on with and divided; what its page tells besides what was measured."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gpipe_cli.config.overrides import override_key
from gpipe_cli.config.schema import CostConfig
from gpipe_cli.errors import RunError
from gpipe_cli.profiling.partition_memory import resident_memory
from gpipe_cli.run.build import RunParts
from gpipe_cli.run.job import Job
from gpipe_cli.run.training_step import optimizer_factory
from gpipe_cli.safe_files import parse_json, read_regular
from gpipe_cli.training.run_directory import write_json
from gpipe_cli.values import parse_bytes

__all__ = ["launch_of", "write_launch"]

NAME = "launch.json"
LARGEST = 16 * 2**20


def launch_of(
    settings: CostConfig,
    job: Job,
    parts: RunParts,
    activations: Sequence[int] | None = None,
    resumed: Path | None = None,
) -> dict[str, Any]:
    """`activations`: what each partition keeps for backward, in bytes, where that is known; `resumed`: which run."""
    limit = settings.device_memory
    before = [] if resumed is None else _commands_before(resumed)
    commands = before if before[-1:] == [job.line] else [*before, job.line]  # ranks begin anew
    return {
        "command": job.command,
        "commands": commands,
        "allow": settings.allow,
        "device_memory": None if limit is None else parse_bytes(limit),
        "partitions": _rows(settings, parts, activations),
        "profile": _profile_line(commands),
    }


def write_launch(directory: Path, launch: Mapping[str, Any]) -> None:
    write_json(directory / NAME, launch)


def _commands_before(run: Path) -> list[str]:
    """The commands of earlier launches."""
    path = run / NAME
    try:
        match parse_json(read_regular(path, LARGEST, base=run)):
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
    except Exception:  # noqa: BLE001 - an optimizer may want other gradients than it is tried with, and yet train
        return rows
    known: list[Mapping[str, Any]] = [asdict(one) for one in resident]
    if activations is None:
        known = [{name: size for name, size in one.items() if name != "activation_bytes"} for one in known]
    else:
        known = [{**one, "activation_bytes": kept} for one, kept in zip(known, activations, strict=True)]
    return [{**row, **sizes} for row, sizes in zip(rows, known, strict=True)]


def _profile_line(commands: Sequence[str]) -> str | None:
    """What records a step of the same pipeline; None where a recipe has a say, which a profile does not take."""
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
    if words.get("engine", "") in ("engine=single", "engine=processes"):
        words = {path: word for path, word in words.items() if path.partition(".")[0] != "engine"}
    return shlex.join(["gpipe", "profile", "timeline=true", *words.values()])
