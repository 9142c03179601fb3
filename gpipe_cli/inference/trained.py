"""A trained model that a command uses: the settings it was trained with, its weights, and an engine that runs it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar, final

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe_cli.accelerator.determinism import deterministic_algorithms
from gpipe_cli.activity import activity
from gpipe_cli.build.components import reads_on_demand, starts_ranks
from gpipe_cli.build.parts import RunParts, make_engine
from gpipe_cli.build.ranks import (
    build_parts_in_ranks,
    connect,
    run_in_ranks,
    settings_for_rank,
    with_heartbeat,
)
from gpipe_cli.config.compose import settings_of
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.saved_paths import search_code
from gpipe_cli.config.schema import RunConfig, TrainedConfig
from gpipe_cli.data.datasets import Data
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import RunError
from gpipe_cli.inference.inference_spec import COMPONENTS, InferenceSpec, spec_of_run, spec_of_weights
from gpipe_cli.launch.rank import is_main_process, is_rank
from gpipe_cli.report.model_tables import print_partitions
from gpipe_cli.report.output import print_status
from gpipe_cli.runs.saved import (
    ChosenSnapshot,
    choose_snapshot,
    load_into_model,
    load_on_demand,
    saved_config,
    weights_file,
    with_overrides,
)
from gpipe_cli.runs.snapshots.manifest import (
    BUFFERS,
    MODEL,
    VerifiedSnapshot,
    first_valid_snapshot,
    is_snapshot,
    run_directory_of,
    search_together,
    snapshot_paths,
)
from gpipe_cli.runs.snapshots.record import base_of_snapshot, check_base
from gpipe_cli.training.signals import StopRequested, StopRequests, stop_requests

Settings = TypeVar("Settings", bound=TrainedConfig)


def with_saved_settings(settings: Settings, job: Job, ignored: Collection[str] = ()) -> Settings:
    """The settings saved with the weights, overridden by those of this command; unchanged where none are saved.

    ignored: keys to leave as they are.
    """
    run = _run_of(settings)
    if run is not None and snapshot_paths(run):  # otherwise choose_snapshot reports what is wrong with it
        saved = saved_config(run)
        search_code(run, settings, job.overrides)
    elif settings.weights is not None and (spec := spec_of_weights(settings.weights)) is not None:
        saved = _config_of(spec, settings.weights)
    else:
        return settings
    # Training has keys of the same names, such as the `seed` of gpipe generate, which mean something else.
    own_keys = {field.name for field in fields(settings)} - {field.name for field in fields(RunConfig)}
    if settings.uses_loss:  # gpipe eval, whose seed is that of the run
        own_keys.remove("seed")
    tree = with_overrides(saved, job.tree, job.overrides, {*own_keys, *ignored})
    merged = settings_of(tree, job.command, job.overrides)
    assert isinstance(merged, type(settings))
    return merged


def saved_spec(settings: TrainedConfig) -> InferenceSpec | None:
    """What was saved with the weights for predictions, if anything was."""
    run = _run_of(settings)
    if run is not None:
        return spec_of_run(run)
    return None if settings.weights is None else spec_of_weights(settings.weights)


def _run_of(settings: TrainedConfig) -> Path | None:
    """The directory of the run that the weights come from; None for a file of weights."""
    path = settings.run or settings.snapshot
    return None if path is None else run_directory_of(Path(path)) if is_snapshot(Path(path)) else Path(path)


def _config_of(spec: InferenceSpec, weights: str) -> DictConfig:
    try:
        return OmegaConf.create({name: getattr(spec, name) for name in COMPONENTS})
    except OmegaConfBaseException as error:
        raise RunError(f"weights={weights}: its metadata cannot be used: {error}") from error


def snapshot_of(settings: TrainedConfig, job: Job, world: World) -> ChosenSnapshot | None:
    """The snapshot to use, or None for a file of weights; where tensors are read on demand, it has none yet.

    Ranks verify its files together. Their launcher leaves that, and all messages, to them.
    """
    launches = starts_ranks(settings) and not job.dry_run
    search = partial(
        first_valid_snapshot,
        wanted=() if reads_on_demand(settings) else (MODEL, BUFFERS),
        verify=not launches,
    )
    if is_rank():
        search = partial(search_together, ignored=(), world=world)
    for key, value in (("run", settings.run), ("snapshot", settings.snapshot)):
        if value is not None:
            says = is_main_process() and not launches
            chosen = choose_snapshot(key, value, settings.which or settings.at, search, warn=says)
            if says:
                print_status(chosen.reason)
            snapshot = chosen.verified
            check_base(base_of_snapshot(snapshot), settings.model, snapshot.path, contents=is_main_process())
            return chosen
    return None


@final
@dataclass(frozen=True)
class TrainedModel(Generic[Settings]):
    """What a command needs to use a trained model in this process; `use_trained` opens it."""

    settings: Settings
    """The settings of this rank."""
    job: Job
    world: World
    snapshot: VerifiedSnapshot | None
    """None for a file of weights, and for a model that reads its own directory."""

    @property
    def has_saved_weights(self) -> bool:
        """False for a model that reads its own directory."""
        return self.snapshot is not None or self.settings.weights is not None

    @property
    def source(self) -> Summary:
        """For the summary: the file or directory that the weights come from, and the command."""
        weights = self.settings.weights if self.snapshot is None else weights_file(self.snapshot)
        if not self.has_saved_weights:
            weights = self.settings.model["path"]
        return {"weights": str(weights), "command": self.job.line}

    def build(self, data: Data | None = None) -> RunParts:
        """Build the parts of the run, and load the weights, unless the engine reads them on demand.

        data: used instead of the configured one.
        """
        settings = self.settings
        parts = build_parts_in_ranks(settings, self.job, self.world, initial_weights=False, data=data)
        if not reads_on_demand(settings) and self.has_saved_weights:
            activity.now("loading the weights")
            load_into_model(parts.model, settings.weights, self.snapshot, parts.referenced)
        return parts

    def run_elsewhere(self, parts: RunParts, **facts: object) -> Summary | None:
        """The summary of ranks that this process starts, or of a dry run, which adds the facts; None: run it here."""
        if self.job.dry_run:
            if not self.job.json:
                print_partitions(parts.partitions)
            return {"partitions": parts.partitions, **facts, **self.source}
        return run_in_ranks(self.settings, self.job, parts) if starts_ranks(self.settings) else None

    @contextmanager
    def engine(self, parts: RunParts) -> Iterator[tuple[Engine, StopRequests]]:
        """An engine that has the weights, closed when the block ends, and what asks the block to stop before that."""
        settings, world = self.settings, self.world
        engine = with_heartbeat(make_engine(settings, parts), settings, parts, world)
        try:
            if reads_on_demand(settings) and self.has_saved_weights:
                load_on_demand(engine, parts.model, settings.weights, self.snapshot)
            with stop_requests(agree=world.max, patient=world.size > 1) as stops:
                yield engine, stops
        except StopRequested as request:
            raise request.error(f"stopped by {request.reason}") from request
        finally:
            engine.close()


@contextmanager
def use_trained(settings: Settings, job: Job) -> Iterator[TrainedModel[Settings]]:
    """Connect this rank to the others, and find the weights."""
    settings = settings_for_rank(settings, job)
    with deterministic_algorithms(enabled=settings.deterministic), connect(settings, job) as world:
        chosen = snapshot_of(settings, job, world)
        yield TrainedModel(settings, job, world, None if chosen is None else chosen.verified)
