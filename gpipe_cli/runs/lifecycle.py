"""The life of a training run: find or create its directory, decide what is left to do, begin and end it.

The order of the lock, the engine and the signals decides what an interrupt or a crash leaves behind; `Run` keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from gpipe_cli.accelerator.determinism import deterministic_algorithms
from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.activity import activity, on_terminal
from gpipe_cli.build.components import starts_ranks, traits_of_engine
from gpipe_cli.build.custom_schedule import write_order
from gpipe_cli.build.fit import check_isolation
from gpipe_cli.build.optimizer import optimizer_factory
from gpipe_cli.build.parts import RunParts, make_engine, train_steps
from gpipe_cli.build.ranks import (
    build_parts_in_ranks,
    connect,
    run_in_ranks,
    settings_for_rank,
    with_heartbeat,
)
from gpipe_cli.config.checks import PROCESSES
from gpipe_cli.config.instantiate import instantiate
from gpipe_cli.config.job import Job, Summary, resume_command
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.engines.state import module_state
from gpipe_cli.errors import RunError
from gpipe_cli.inference.inference_spec import write_spec
from gpipe_cli.launch.rank import is_main_process
from gpipe_cli.launch.rank_setup import PRACTICALLY_FOREVER, connected_files, lost_peer_as_peer_error
from gpipe_cli.profiling.memory import state_bytes
from gpipe_cli.report.model_tables import measured_memory_rows
from gpipe_cli.runs.directory import (
    check_run_dir,
    lock_run_directory,
    make_run_directory,
    planned_run_directory,
    recorded_outcome,
)
from gpipe_cli.runs.launch_record import (
    changed_ranks,
    launch_facts,
    write_config,
    write_launch,
    write_settings,
)
from gpipe_cli.runs.reader import OUTCOME, DiskUse
from gpipe_cli.runs.recorder import GuardedLogger, RankRecorder, Recorder, RunRecorder
from gpipe_cli.runs.resume import (
    ResumedRun,
    check_resumable,
    load_resumed_run,
    lr_line,
    verified_in_ranks,
    version_changes,
)
from gpipe_cli.runs.snapshots.manager import Retention, SnapshotManager, check_snapshot_space
from gpipe_cli.runs.snapshots.manifest import rewind_snapshots
from gpipe_cli.runs.summary import (
    finished_summary,
    stop_with_resume_command,
    summarize,
    write_report,
    write_summary,
)
from gpipe_cli.safe_files import writing
from gpipe_cli.training.loop import EarlyStop, Position, TrainSpec
from gpipe_cli.training.metrics import metrics_length_at, truncate_metrics
from gpipe_cli.training.signals import StopRequests, defer_signals
from gpipe_cli.values import parse_duration

if TYPE_CHECKING:  # a run loads what its page needs when it begins, and the planner only if it is planned
    from gpipe_cli.plan.for_training import PlannedRun
    from gpipe_cli.runs.page_files import RunPage

KEPT_IN_TRAINING = 3
"""Snapshots besides the best one, unless snapshot.keep says how many."""


class Do(Enum):
    """What a command has to do with a run."""

    SHOW = auto()
    NOTHING = auto()
    LAUNCH = auto()
    TRAIN = auto()


@contextmanager
def open_run(settings: TrainConfig, job: Job) -> Iterator[Run]:
    """A new or resumed run, with its ranks connected. Until the block ends, a resumed one is locked."""
    with ExitStack() as cleanup:
        resumed = load_resumed_run(settings, job, cleanup, lock=is_main_process())
        if resumed is None and is_main_process():
            check_run_dir(settings.run_dir)
        settings = replace(settings, resume=None) if resumed is None else resumed.settings
        cleanup.enter_context(deterministic_algorithms(enabled=settings.deterministic))
        planned = None
        if settings.plan.auto:
            # Late: other runs need no planner, and it takes a while to load.
            from gpipe_cli.plan.for_training import with_best_plan

            planned = with_best_plan(settings, job)
            settings, job = planned.settings, planned.job
        settings = settings_for_rank(settings, job)
        world = cleanup.enter_context(connect(settings, job))
        run = Run(settings, job, world, verified_in_ranks(resumed, world), cleanup, planned)
        del resumed, planned  # the run decides how long the tensors of its snapshot and of its model are kept
        yield run


@final
class Run:
    """A training run; `open_run` makes it, and closes what it opens."""

    def __init__(
        self,
        settings: TrainConfig,
        job: Job,
        world: World,
        resumed: ResumedRun | None,
        cleanup: ExitStack,
        planned: PlannedRun | None = None,
    ) -> None:
        self.settings, self.job, self.world = settings, job, world
        self.record = None if resumed is None else resumed.record
        """The record of the snapshot to resume from; None for a run that starts at step 0."""
        self.directory = Path() if resumed is None else resumed.directory
        """The run directory; that of a new run is known from `begun` on."""
        self._resumed, self._cleanup, self._planned = resumed, cleanup, planned
        self._page: RunPage | None = None
        self._logger: GuardedLogger | None = None
        self._launch: dict[str, Any] = {}
        self._messages: list[str] = []

    @property
    def position(self) -> Position:
        return Position() if self.record is None else self.record.position

    @property
    def page(self) -> RunPage:
        assert self._page is not None, "the engine was made"
        return self._page

    def build(self) -> RunParts:
        planned, self._planned = self._planned, None
        order = None if self._resumed is None else self._resumed.order
        if planned is not None and planned.order is not None:
            order = planned.order
        return build_parts_in_ranks(
            self.settings,
            self.job,
            self.world,
            initial_weights=self.record is None,
            order=order,
            built=None if planned is None else planned.built,
        )

    def spec(self, parts: RunParts) -> TrainSpec:
        settings, loader, stop = self.settings, parts.loader, self.settings.early_stop
        every = settings.eval.every
        early_stop = None
        if stop.patience is not None:
            assert settings.snapshot.monitor is not None, "the configuration was checked"
            early_stop = EarlyStop(settings.snapshot.monitor, stop.patience, stop.min_delta)
        spec = TrainSpec(
            steps=train_steps(settings, loader),
            steps_per_epoch=loader.steps_per_epoch,
            lr=settings.optimizer["lr"],
            lr_schedule=instantiate(settings.lr_schedule, "lr_schedule", settings.allow),
            seed=settings.seed,
            measure_every=settings.log.every,
            eval_batches=loader.eval_batches,
            eval_every=settings.eval_every if every == "epoch" else every,
            eval_epochs=every == "epoch",
            early_stop=early_stop,
        )
        check_resumable(spec, self.record)
        return spec

    def what_to_do(self, spec: TrainSpec) -> Do:
        if self.job.dry_run:
            return Do.SHOW
        if self.record is not None and spec.is_done(self.record.position, self.record.patience):
            return Do.NOTHING
        return Do.LAUNCH if starts_ranks(self.settings) else Do.TRAIN

    def finished(self, parts: RunParts, spec: TrainSpec) -> Summary:
        """The summary of a run that has nothing left to train."""
        assert self.record is not None, "it was trained"
        return finished_summary(self.directory, self.record, spec, parts.loader, self.job)

    def launch_ranks(self, parts: RunParts, spec: TrainSpec) -> Summary:
        """Start ranks that train; the summary of rank 0."""
        self._check_disk(parts, spec)
        self._resumed = None
        self._cleanup.close()  # releases the lock on the run directory: rank 0 takes it
        return run_in_ranks(self.settings, self.job, parts)

    def engine(self, parts: RunParts, spec: TrainSpec) -> Engine:
        """The engine with the state of the snapshot, closed when the run is."""
        settings, traits = self.settings, traits_of_engine(self.settings)
        self._logger = GuardedLogger(settings)
        # Before the engine takes the model: one of several ranks keeps only its own partitions.
        resumed = None if self._resumed is None else self.directory
        self._launch = launch_facts(settings, self.job, parts, resumed=resumed)
        # Late: `gpipe train` starts in less time without it.
        from gpipe_cli.runs.page_files import RunPage

        self._page = RunPage(settings, parts, self.world)
        # A rank's engine keeps only its part of the model, so ranks check before they have one. An engine in this
        # process may itself take space on that disk (engine.to=disk), so the check comes after it.
        warning = self._check_disk(parts, spec) if traits.needs_processes else None
        engine = make_engine(settings, parts, measure_utilization=on_terminal(), observe=self.page.observer)
        engine = with_heartbeat(engine, settings, parts, self.world)
        self._cleanup.callback(engine.close)
        if not traits.needs_processes:
            warning = self._check_disk(parts, spec)
        self._messages = [] if warning is None else [warning]
        self._restore(engine, traits.build_memory_hint)
        check_isolation(engine, parts.loader.data)
        return engine

    @contextmanager
    def begun(self, parts: RunParts, spec: TrainSpec) -> Iterator[Recorder]:
        """Set up the directory and record the run; from here on a signal waits for the next step boundary."""
        settings, cleanup, logger = self.settings, self._cleanup, self._logger
        assert logger is not None, "the engine was made"
        cleanup.enter_context(defer_signals())  # the run has a directory and a state to save
        messages = self._set_up_directory(spec)
        if self.world.is_rank_zero:
            write_launch(self.directory, {**self._launch, "steps": spec.steps})
            write_order(self.directory, parts.partitioning.spec)
            write_spec(self.directory, settings, parts.loader)
            cleanup.callback(write_report, self.directory)  # however the run ends
            cleanup.enter_context(recorded_outcome(self.directory))
            cleanup.enter_context(logger.opened(self.directory, self.position, self.job))
        self._resumed = None  # frees the snapshot's tensors, which the engine has copied
        recorders: AbstractContextManager[Recorder] = (
            RunRecorder.open(
                self.directory,
                spec,
                settings.log,
                self.position,
                logger=logger,
                partitions=self._launch["partitions"],
            )
            if self.world.is_rank_zero
            else RankRecorder.open(self.directory, self.world.rank, settings.log, self.position)
        )
        with recorders as recorder:
            self._record_start(recorder, messages, parts)
            self.page.begin(self.directory, recorder.print_status)
            yield recorder

    @contextmanager
    def stops(self) -> Iterator[StopRequests]:
        """Requests to stop. A run that was stopped ends with the command that resumes it."""
        limit = parse_duration(self.settings.time_limit) if self.settings.time_limit else None
        deadline = None if limit is None else self.job.began + limit
        with (
            lost_peer_as_peer_error(),  # before the log and the outcome are written
            stop_with_resume_command(self.directory, self.settings, deadline, self.world) as stops,
        ):
            yield stops

    def snapshots(
        self, engine: Engine, spec: TrainSpec, parts: RunParts, recorder: Recorder
    ) -> SnapshotManager:
        base = parts.base
        if base is not None and self.record is not None:
            base.verified = self.record.base
        return SnapshotManager(
            self.directory,
            engine,
            spec,
            self._retention,
            self.record,
            recorder.sync,
            base_files=None if base is None else base.digests,
            world=self.world.for_thread(PRACTICALLY_FOREVER),
        )

    def ended(self, end: Position, stopped_early: str | None, parts: RunParts, engine: Engine) -> Summary:
        """Write and return the summary; stopped_early: why, if it did."""
        summary = summarize(end, parts.loader, self.directory, self.job, stopped_early)
        summary |= parts.made.notes
        rows, workers = self._launch["partitions"], parts.partitioning.workers
        summary["partitions"] = measured_memory_rows(rows, workers, engine.peak_bytes())
        if self.world.is_rank_zero:
            summary["run_bytes"] = DiskUse.of(self.directory).bytes
            write_summary(self.directory, summary)
        return summary

    @property
    def _retention(self) -> Retention:
        snapshot = self.settings.snapshot
        every = None if snapshot.every == "epoch" else snapshot.every
        if snapshot.keep is None:
            return Retention(every, KEPT_IN_TRAINING, snapshot.monitor, finished=1)
        return Retention(every, snapshot.keep, snapshot.monitor)

    def _check_disk(self, parts: RunParts, spec: TrainSpec) -> str | None:
        """Check that the disk has room for a snapshot; a warning if it has none for all of them."""
        # Not those of `module_state`, which leaves out parameters that are not loaded yet.
        model = parts.model
        saved = (tensor for name, tensor in model.state_dict().items() if name not in parts.referenced)
        size = sum(tensor.nbytes for tensor in (*saved, *module_state(model).buffers.values()))
        try:
            factory = optimizer_factory(self.settings, model)
            size += sum(state_bytes(factory, model.named_parameters()))
        except Exception:  # noqa: BLE001 - an optimizer may reject the gradients of the trial step, and still train
            pass
        is_new = self._resumed is None
        directory = planned_run_directory(self.settings.run_dir) if is_new else self.directory
        return check_snapshot_space(directory, spec, self._retention, size)

    def _restore(self, engine: Engine, memory_hint: str) -> None:
        resumed = self._resumed
        if resumed is None or resumed.snapshot is None:
            return
        activity.now("loading the snapshot")
        try:
            with report_out_of_memory("loading the snapshot", memory_hint):
                engine.load_state(resumed.state_for(engine.module))
        except RunError as error:
            raise RunError(f"{resumed.snapshot.path}: {error}") from error

    def _set_up_directory(self, spec: TrainSpec) -> list[str]:
        """Create or rewind the directory on rank 0, which stays its only writer; what to tell the user."""
        messages: list[str] = []
        resumed = self._resumed
        if self.world.is_rank_zero and resumed is not None:
            messages = _rewind(resumed)
            line = lr_line(resumed.saved, resumed.settings, spec, self.position.step, self.job.overrides)
            messages += [] if line is None else [line]
            messages += changed_ranks(self.directory, self._launch)
        elif self.world.is_rank_zero:
            self.directory = make_run_directory(self.settings.run_dir, self.job.command, self.job.model)
            self._cleanup.enter_context(lock_run_directory(self.directory))
            write_config(self.directory, self.job)
        name = str(self.directory) if self.world.is_rank_zero else ""
        self.directory = Path(self.world.from_rank_zero(name))
        if (files := connected_files()) is not None:
            # If the ranks fail, a launcher restarts the job in this directory, and a monitor writes the reason there.
            files.write_run_directory(self.directory)
        return messages

    def _record_start(self, recorder: Recorder, messages: list[str], parts: RunParts) -> None:
        settings, partitioning = self.settings, parts.partitioning
        recorder.print_status(f"run directory: {self.directory}")
        if on_terminal():
            recorder.print_status(f"if this terminal closes: {resume_command(self.directory, settings)}")
        for message in (*messages, *parts.made.lines):
            recorder.print_status(message)
        if settings.chunks > settings.batch_size:
            recorder.print_status(
                f"chunks={settings.chunks} is more than batch_size={settings.batch_size}: "
                f"each mini-batch is split into {settings.batch_size} micro-batches"
            )
        if settings.ema is not None:
            recorder.print_status(f"ema={settings.ema:g}: evaluations and snapshots use the averaged weights")
        for message in self._messages:
            recorder.print_status(message)
        partitioning.print_origin(recorder.print_status)
        for row, cost in zip(self._launch["partitions"], partitioning.balanced.sums, strict=True):
            recorder.log.write(
                "partition %(partition)d on %(device)s: layers %(first)s to %(last)s (%(layers)d), "
                "%(parameters)d parameters, cost %(cost).6g %(unit)s",
                {**row, "cost": cost, "unit": partitioning.balanced.unit},
            )


def _rewind(resumed: ResumedRun) -> list[str]:
    """Take the directory back to its snapshot; the settings of this launch become those of the run.

    Return what to tell the user.
    """
    directory, record = resumed.directory, resumed.record
    position = Position() if record is None else record.position
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
            write_settings(directory, resumed.tree, resumed.settings)
    new_optimizer = ", with a new optimizer state" if resumed.settings.reset_optimizer else ""
    return [
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


def _changed_replicas(*configs: Any) -> list[str]:
    """What another number of replicas, or an engine that has one, means for the results."""
    # Compare names: the engine that a run names may be anybody's code.
    before, now = (
        config.data_parallel if config.engine["_target_"] == PROCESSES else 1 for config in configs
    )
    lost = "gradients are summed in another order, so results may differ in the last bits"
    return [f"replicas: {before} -> {now}: {lost}"] if before != now else []
