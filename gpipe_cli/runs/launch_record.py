"""What a run was started with, in its directory: config.yaml, paths.json, overrides.yaml, env.json, and launch.json.

launch.json has the commands that started and resumed the run, and the partitions of the last launch.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.build.components import traits_of_engine
from gpipe_cli.build.model import FILE, own_keys
from gpipe_cli.build.optimizer import kept_state, optimizer_factory
from gpipe_cli.build.parts import RunParts
from gpipe_cli.config.instantiate import path_arguments
from gpipe_cli.config.job import Job
from gpipe_cli.config.keys import chosen_options
from gpipe_cli.config.saved_paths import FOLDER, PATHS, saved_places
from gpipe_cli.config.schema import COMPONENT_GROUPS, CostConfig, ModelConfig
from gpipe_cli.errors import RunError
from gpipe_cli.launch.rank import is_rank
from gpipe_cli.profiling.memory import resident_memory
from gpipe_cli.report.environment import environment
from gpipe_cli.runs.directory import write_json, write_text
from gpipe_cli.safe_files import parse_json, read_regular
from gpipe_cli.values import AUTO, flatten, parse_bytes

LAUNCH_FILE = "launch.json"
MAX_LAUNCH_BYTES = 16 * 2**20


def launch_facts(
    settings: CostConfig,
    job: Job,
    parts: RunParts,
    activations: Sequence[int] | None = None,
    resumed: Path | None = None,
) -> dict[str, Any]:
    """The facts of launch.json: the commands that started and resumed the run, and its partitions.

    `profile` is what a profile of the run needs besides its configuration: another engine if that of the run cannot
    record its steps.
    activations: the bytes each partition saves for backward, if known; resumed: the directory of a resumed run.
    """
    limit = settings.device_memory
    has_timeline = bool(settings.engine) and traits_of_engine(settings).has_timeline
    earlier = {} if resumed is None else _earlier_launch(resumed)
    before = earlier.get("commands", [])
    commands = before if before[-1:] == [job.line] else [*before, job.line]  # restarted ranks repeat it
    facts = parts.made.facts
    return {
        "command": job.command,
        "commands": commands,
        "allow": settings.allow,
        "device_memory": None if limit is None else parse_bytes(limit),
        "partitions": _partition_rows(settings, parts, activations),
        "ranks": int(os.environ["WORLD_SIZE"]) if is_rank() else 1,
        "hosts": int(os.environ.get("GROUP_WORLD_SIZE", "1")) if is_rank() else 1,
        "profile": [] if has_timeline else [f"engine={chosen_options('profile')['engine'].name}"],
        **facts,
        "loaded": facts["loaded"] or earlier.get("loaded"),  # only when a run starts
    }


def changed_ranks(run: Path, launch: Mapping[str, Any]) -> list[str]:
    """What differs if a run was resumed with another number of ranks or hosts, as when a host is lost."""
    before = _earlier_launch(run)
    numbers = [(facts.get("ranks"), facts.get("hosts")) for facts in (before, launch)]
    if None in numbers[0] or numbers[0] == numbers[1]:
        return []
    texts = [
        f"ranks: {ranks}, hosts: {hosts}, balance: {[row['layers'] for row in facts['partitions']]}"
        for (ranks, hosts), facts in zip(numbers, (before, launch), strict=True)
    ]
    return [f"changed: {' -> '.join(texts)}"]


def write_launch(directory: Path, launch: Mapping[str, Any]) -> None:
    write_json(directory / LAUNCH_FILE, launch)


def write_config(directory: Path, job: Job) -> None:
    """Write what was asked for, and on which machine."""
    assert isinstance(job.settings, ModelConfig), "it builds a model"
    write_settings(directory, job.tree, job.settings)
    write_text(directory / "overrides.yaml", OmegaConf.to_yaml(list(job.overrides)))
    write_json(directory / "env.json", environment())


def write_settings(directory: Path, tree: DictConfig, settings: ModelConfig) -> None:
    """Write the settings with absolute paths, and where these and the current folder are from the run."""
    tree = copy.deepcopy(tree)
    before = saved_places(directory).get(FOLDER)
    places = {FOLDER: str(Path.cwd()) if before is None else before.found}
    values = dict(flatten(OmegaConf.to_container(tree), inner=True))
    for key in _path_keys(settings):
        path = values.get(key)
        # A reference may mean another path tomorrow, and `auto` is none.
        if isinstance(path, str) and "${" not in path and path != AUTO:
            places[key] = str(Path(path).absolute())
            OmegaConf.update(tree, key, places[key])
    write_text(directory / "config.yaml", OmegaConf.to_yaml(tree))
    run = directory.absolute()
    write_json(directory / PATHS, {key: [path, os.path.relpath(path, run)] for key, path in places.items()})


def _path_keys(settings: ModelConfig) -> Iterator[str]:
    yield "schedule.path"
    if FILE in own_keys(settings):
        yield f"model.{FILE}"
    for group in COMPONENT_GROUPS:
        if node := getattr(settings, group, None):
            yield from path_arguments(node, group, settings.allow, group)


def _earlier_launch(run: Path) -> Mapping[str, Any]:
    """The facts of the run so far, with the commands that started and resumed it."""
    path = run / LAUNCH_FILE
    try:
        match parse_json(read_regular(path, MAX_LAUNCH_BYTES, base=run)):
            case {"commands": list(lines), **rest} if all(
                isinstance(line, str) and shlex.split(line) for line in lines
            ):
                loaded = rest.get("loaded")
                known = _known_ranks(rest)
                return {"commands": lines, "loaded": loaded if isinstance(loaded, str) else None, **known}
        raise ValueError("it lists no commands")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: cannot be read: {error}; repair it, or remove it to resume without the earlier commands"
        ) from error


def _known_ranks(launch: object) -> Mapping[str, Any]:
    """How many ranks ran which layers; nothing for a run that is older than these facts."""
    match launch:
        case {"ranks": int(ranks), "hosts": int(hosts), "partitions": [*rows]} if all(
            isinstance(row, dict) and isinstance(row.get("layers"), int) for row in rows
        ):
            return {"ranks": ranks, "hosts": hosts, "partitions": rows}
    return {}


def _partition_rows(
    settings: CostConfig, parts: RunParts, activations: Sequence[int] | None
) -> list[dict[str, Any]]:
    rows = parts.partitions
    try:
        resident = resident_memory(
            parts.model,
            parts.partitioning.balance,
            optimizer_factory(settings, parts.model),
            kept_state(settings),
        )
    except Exception:  # noqa: BLE001 - an optimizer may reject the trial gradients, and still train
        return rows
    sizes: list[Mapping[str, Any]] = [asdict(partition) for partition in resident]
    if activations is None:
        sizes = [{name: size for name, size in row.items() if name != "activation_bytes"} for row in sizes]
    else:
        sizes = [{**row, "activation_bytes": saved} for row, saved in zip(sizes, activations, strict=True)]
    return [{**row, **own} for row, own in zip(rows, sizes, strict=True)]
