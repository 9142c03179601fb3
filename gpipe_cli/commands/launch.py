"""launch.json: how a run was started, gone on with and divided; what its page tells besides what was measured."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gpipe_cli.byte_size import byte_count
from gpipe_cli.commands.assemble import Assembly
from gpipe_cli.commands.course import optimizer_factory
from gpipe_cli.commands.jobs import Job
from gpipe_cli.config.schema import Costed
from gpipe_cli.profiling.memory import resident_memory
from gpipe_cli.training.run_directory import write_json

__all__ = ["launch_of", "write_launch"]

NAME = "launch.json"


def launch_of(
    settings: Costed, job: Job, parts: Assembly, activations: Sequence[int] | None = None
) -> dict[str, Any]:
    """`activations`: what each partition keeps for backward, in bytes, where that is known."""
    limit = settings.device_memory
    return {
        "command": job.command,
        "commands": [job.line],
        "allow": settings.allow,
        "device_memory": None if limit is None else byte_count(limit),
        "partitions": _rows(settings, parts, activations),
    }


def write_launch(directory: Path, launch: Mapping[str, Any]) -> None:
    """After the commands of earlier launches, where the run goes on."""
    before = _before(directory)
    commands = (
        before if before[-1:] == launch["commands"] else [*before, *launch["commands"]]
    )  # ranks begin anew
    write_json(directory / NAME, {**launch, "commands": commands, "profile": _profile_line(commands)})


def _before(directory: Path) -> list[str]:
    """The commands of a run that goes on; a file that cannot be read says nothing."""
    try:
        found = json.loads((directory / NAME).read_text(encoding="utf-8"))
        return [line for line in found["commands"] if isinstance(line, str)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _rows(settings: Costed, parts: Assembly, activations: Sequence[int] | None) -> list[dict[str, Any]]:
    rows = parts.partitions
    try:
        resident = resident_memory(parts.model, parts.split.balance, optimizer_factory(settings))
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
    taken = {"engine", *(field.name for field in fields(Costed))}
    words: dict[str, str] = {}
    for line in commands:
        given = shlex.split(line)[2:]
        if any(word.startswith(("recipe=", "--config-")) for word in given):
            return None
        for word in given:
            path = word.lstrip("+~").partition("=")[0]
            if path.partition(".")[0] in taken:
                words[path] = word
    if words.get("engine", "") in ("engine=single", "engine=processes"):
        words = {path: word for path, word in words.items() if path.partition(".")[0] != "engine"}
    return shlex.join(["gpipe", "profile", "timeline=true", *words.values()])
