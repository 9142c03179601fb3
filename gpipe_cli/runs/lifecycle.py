"""Set up the directory of a run: create it with what is needed to repeat the run, or rewind it to resume."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from omegaconf import OmegaConf
from torch import nn

from gpipe_cli.build.components import traits_of_engine
from gpipe_cli.build.optimizer import kept_state, optimizer_factory
from gpipe_cli.build.parts import RunParts
from gpipe_cli.config.job import Job
from gpipe_cli.config.keys import chosen_options
from gpipe_cli.config.schema import CostConfig, TrainConfig
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.state import module_state
from gpipe_cli.errors import RunError
from gpipe_cli.launch.rank import is_rank
from gpipe_cli.launch.rank_setup import connected_files
from gpipe_cli.profiling.memory import resident_memory
from gpipe_cli.profiling.optimizer_state import state_bytes
from gpipe_cli.report.environment import environment
from gpipe_cli.runs.directory import lock_run_directory, make_run_directory, write_json, write_text
from gpipe_cli.runs.lr_after_resume import lr_line
from gpipe_cli.runs.reader import OUTCOME
from gpipe_cli.runs.resume import ResumedRun, version_changes
from gpipe_cli.runs.snapshots.manager import Retention, check_snapshot_space
from gpipe_cli.runs.snapshots.manifest import rewind_snapshots
from gpipe_cli.runs.snapshots.record import TrainingRecord
from gpipe_cli.safe_files import parse_json, read_regular, writing
from gpipe_cli.training.loop import Position, TrainSpec
from gpipe_cli.training.metrics import metrics_length_at, truncate_metrics
from gpipe_cli.values import parse_bytes

LAUNCH_FILE = "launch.json"
MAX_LAUNCH_BYTES = 16 * 2**20
PROCESSES = "gpipe_cli.engines.processes.build"


@final
@dataclass(frozen=True)
class RunSetup:
    """A run that is ready to train."""

    directory: Path
    record: TrainingRecord | None = None
    """Of the snapshot to resume from; None for a run that starts at step 0."""
    messages: Sequence[str] = ()

    @property
    def position(self) -> Position:
        return Position() if self.record is None else self.record.position


def check_disk_space(
    run: Path,
    settings: TrainConfig,
    model: nn.Sequential,
    spec: TrainSpec,
    retention: Retention,
    referenced: Collection[str],
) -> str | None:
    """Check before the run has a directory that its disk has room for a snapshot; return a warning, if any.

    referenced: the parameters that snapshots leave out.
    """
    # Not those of `module_state`, which leaves out parameters that are not loaded yet.
    saved = (tensor for name, tensor in model.state_dict().items() if name not in referenced)
    size = sum(tensor.nbytes for tensor in (*saved, *module_state(model).buffers.values()))
    try:
        optimizer_size = sum(state_bytes(optimizer_factory(settings, model), model.named_parameters()))
    except Exception:  # noqa: BLE001 - an optimizer may reject the gradients of the trial step, and still train
        optimizer_size = 0
    return check_snapshot_space(run, spec, retention, size + optimizer_size)


def set_up_run(
    settings: TrainConfig,
    job: Job,
    resumed: ResumedRun | None,
    cleanup: ExitStack,
    world: World,
    spec: TrainSpec,
    launch: Mapping[str, Any],
) -> RunSetup:
    """Set up the run directory on rank 0, which stays its only writer until `cleanup` is closed; tell all ranks.

    launch: the facts of this launch, to be compared with those of the last one.
    """
    record = None if resumed is None else resumed.record
    setup = None
    if world.is_rank_zero and resumed is not None:
        setup = _rewind(resumed, record)
        step = setup.position.step
        if line := lr_line(resumed.saved, resumed.settings, spec, step, job.overrides):
            setup = replace(setup, messages=[*setup.messages, line])
        setup = replace(setup, messages=[*setup.messages, *_changed_ranks(resumed.directory, launch)])
    elif world.is_rank_zero:
        directory = make_run_directory(settings.run_dir, job.command, job.model)
        cleanup.enter_context(lock_run_directory(directory))
        write_config(directory, job)
        setup = RunSetup(directory)
    directory = Path(world.from_rank_zero("" if setup is None else str(setup.directory)))
    files = connected_files()
    if files is not None:
        # If the ranks fail, a launcher restarts the job in this directory, and a monitor writes the reason there.
        files.write_run_directory(directory)
    return RunSetup(directory, record) if setup is None else setup


def write_config(directory: Path, job: Job) -> None:
    """Write what was asked for, and on which machine."""
    write_text(directory / "config.yaml", OmegaConf.to_yaml(job.tree))
    write_text(directory / "overrides.yaml", OmegaConf.to_yaml(list(job.overrides)))
    write_json(directory / "env.json", environment())


def _rewind(resumed: ResumedRun, record: TrainingRecord | None) -> RunSetup:
    """Take the directory back to its snapshot; the settings of this launch become those of the run."""
    directory, position = resumed.directory, Position() if record is None else record.position
    snapshot = None if resumed.snapshot is None else resumed.snapshot.path
    metrics = directory / "metrics.jsonl"
    # Read metrics.jsonl before anything changes, because a damaged file is an error. Cut it after the newer snapshots
    # are set aside: they count rows that the cut removes, and a crash in between must not leave them usable.
    with writing(metrics):
        size = metrics_length_at(metrics, position)
    with writing(directory):
        set_aside = rewind_snapshots(directory, position.step, snapshot)
        truncate_metrics(metrics, size)
        for name in ("summary.json", OUTCOME):
            (directory / name).unlink(missing_ok=True)
        if resumed.changes:
            write_text(directory / "config.yaml", OmegaConf.to_yaml(resumed.tree))
    new_optimizer = ", with a new optimizer state" if resumed.settings.reset_optimizer else ""
    messages = [
        "the run has no usable snapshot; starting again at step 0"
        if snapshot is None
        else f"resuming from {snapshot}{new_optimizer}",
        *(
            f"set aside, because it is damaged or newer than the snapshot in use: {name}"
            for name in set_aside
        ),
        *(version_changes(record) if record is not None else ()),
        *(f"changed: {change}" for change in resumed.changes),
        *_changed_replicas(resumed.saved, resumed.settings),
    ]
    return RunSetup(directory, record, messages)


def _changed_replicas(*configs: Any) -> list[str]:
    """What another number of replicas, or an engine that has one, means for the results."""
    # Compare names: the engine that a run names may be anybody's code.
    before, now = (
        config.data_parallel if config.engine["_target_"] == PROCESSES else 1 for config in configs
    )
    lost = "gradients are summed in another order, so results may differ in the last bits"
    return [f"replicas: {before} -> {now}: {lost}"] if before != now else []


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


def _changed_ranks(run: Path, launch: Mapping[str, Any]) -> list[str]:
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
