"""gpipe train: resume or set up a run, build data, model, partitions and engine, train, and summarize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from gpipe_cli.accelerator.determinism import deterministic_algorithms
from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.build.components import starts_ranks, traits_of_engine
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.build.optimizer import kept_state, optimizer_factory
from gpipe_cli.build.parts import RunParts, make_engine, train_steps
from gpipe_cli.build.ranks import (
    build_parts_in_ranks,
    connect,
    run_in_ranks,
    settings_for_rank,
    with_heartbeat,
)
from gpipe_cli.build.step import autocast_of, make_sample
from gpipe_cli.config.instantiate import instantiate
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.inference.spec import write_spec
from gpipe_cli.launch.outcome import recorded_outcome
from gpipe_cli.launch.rank import is_main_process
from gpipe_cli.launch.rank_setup import PRACTICALLY_FOREVER, lost_peer_as_peer_error
from gpipe_cli.profiling.memory import partition_memory
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.report.model_tables import (
    flop_rows,
    measured_memory_rows,
    print_layers,
    print_partition_memory,
    print_partitions,
)
from gpipe_cli.report.output import print_status
from gpipe_cli.report.progress import on_terminal
from gpipe_cli.report.tables import print_facts
from gpipe_cli.run.auto_plan import with_best_plan
from gpipe_cli.run.chosen_order import write_order
from gpipe_cli.runs.directory import check_run_dir, planned_run_directory
from gpipe_cli.runs.lifecycle import RunSetup, check_disk_space, launch_facts, set_up_run, write_launch
from gpipe_cli.runs.page_files import RunPage
from gpipe_cli.runs.recorder import GuardedLogger, RankRecorder, Recorder, RunRecorder
from gpipe_cli.runs.resume import ResumedRun, check_resumable, load_resumed_run, verified_in_ranks
from gpipe_cli.runs.snapshots.manager import Retention, SnapshotManager, save_and_stop
from gpipe_cli.runs.summary import (
    print_summary,
    stop_with_resume_command,
    summarize,
    summary_if_finished,
    write_report,
    write_summary,
)
from gpipe_cli.training.early_stop import EarlyStop
from gpipe_cli.training.loop import EvalResult, TrainSpec, train
from gpipe_cli.training.signals import defer_signals
from gpipe_cli.values import parse_duration

Rows = Sequence[Mapping[str, Any]]


def run(settings: TrainConfig, job: Job) -> Summary:
    with ExitStack() as cleanup:
        resumed = load_resumed_run(settings, job, cleanup, lock=is_main_process())
        if resumed is None and is_main_process():
            check_run_dir(settings.run_dir)
        settings = replace(settings, resume=None) if resumed is None else resumed.settings
        cleanup.enter_context(deterministic_algorithms(enabled=settings.deterministic))
        if settings.plan.auto:
            settings, job = with_best_plan(settings, job)
        settings = settings_for_rank(settings, job)
        world = cleanup.enter_context(connect(settings, job))
        resumed = verified_in_ranks(resumed, world)
        record, order = (None, None) if resumed is None else (resumed.record, resumed.order)
        parts = build_parts_in_ranks(settings, job, world, initial_weights=record is None, order=order)
        spec = _train_spec(settings, parts.loader)
        check_resumable(spec, record)
        if job.dry_run:
            return _dry_run(settings, job, parts, spec.steps)
        summary = None if resumed is None else summary_if_finished(resumed, spec, parts.loader, job)
        disk_check = _disk_check(settings, job, resumed, parts, spec)
        # A rank's engine keeps only its part of the model, so ranks check before they have one. An engine in this
        # process may itself take space on that disk (engine.to=disk), so the check comes after it.
        warning = disk_check() if summary is None and traits_of_engine(settings).needs_processes else None
        if summary is None and starts_ranks(settings):
            resumed = None
            cleanup.close()  # releases the lock on the run directory: rank 0 takes it
            summary = run_in_ranks(settings, job, parts)
        elif summary is None:
            logger = GuardedLogger(settings)
            # Before the engine takes the model: one of several ranks keeps only its own partitions.
            launch = launch_facts(
                settings, job, parts, resumed=None if resumed is None else resumed.directory
            )
            page = RunPage(settings, parts, world)
            engine = make_engine(settings, parts, measure_utilization=on_terminal(), observe=page.observer)
            engine = with_heartbeat(engine, settings, parts, world)
            cleanup.callback(engine.close)
            warning = warning if traits_of_engine(settings).needs_processes else disk_check()
            _restore(engine, resumed, traits_of_engine(settings).build_memory_cure)
            # From here on a signal waits for the next step boundary: the run has a directory and a state to save.
            cleanup.enter_context(defer_signals())
            setup = set_up_run(settings, job, resumed, cleanup, world, spec, launch)
            if world.is_rank_zero:
                _write_facts(setup.directory, settings, parts, {**launch, "steps": spec.steps})
                cleanup.callback(write_report, setup.directory)  # however the run ends
                cleanup.enter_context(recorded_outcome(setup.directory))
                cleanup.enter_context(logger.opened(setup.directory, setup.position, job))
            resumed = None  # frees the snapshot's tensors, which the engine has copied
            with _recorder(settings, spec, setup, world, logger, launch["partitions"]) as recorder:
                _record_start(recorder, settings, setup, warning, parts, launch["partitions"])
                last, stopped = _train(settings, parts, spec, engine, setup, job.began, recorder, world, page)
            summary = summarize(last, parts.loader, setup.directory, job, stopped)
            summary |= parts.made.notes
            workers = parts.partitioning.workers
            summary["partitions"] = measured_memory_rows(launch["partitions"], workers, engine.peak_bytes())
            if world.is_rank_zero:
                write_summary(setup.directory, summary)
    if job.shows_result and is_main_process():
        print_summary(summary, settings)
    return summary


def _write_facts(run: Path, settings: TrainConfig, parts: RunParts, launch: Mapping[str, Any]) -> None:
    write_launch(run, launch)
    write_order(run, parts.partitioning.spec)
    write_spec(run, settings, parts.loader)


def _disk_check(
    settings: TrainConfig, job: Job, resumed: ResumedRun | None, parts: RunParts, spec: TrainSpec
) -> Callable[[], str | None]:
    directory = planned_run_directory(settings.run_dir) if resumed is None else resumed.directory
    return partial(
        check_disk_space, directory, settings, parts.model, spec, _retention(settings), parts.referenced
    )


def _train(
    settings: TrainConfig,
    parts: RunParts,
    spec: TrainSpec,
    engine: Engine,
    setup: RunSetup,
    started: float,
    recorder: Recorder,
    world: World,
    page: RunPage,
) -> tuple[EvalResult, str | None]:
    """Run the loop with snapshots and stop requests; the last evaluation, and why the run stopped early if it did.

    started: when the command did, for its time limit.
    """
    limit = parse_duration(settings.time_limit) if settings.time_limit else None
    deadline = None if limit is None else started + limit
    retention, loader, base = _retention(settings), parts.loader, parts.base
    if base is not None and setup.record is not None:
        base.verified = setup.record.base
    page.begin(setup.directory, recorder.print_status)
    with (
        lost_peer_as_peer_error(),  # before the log and the outcome are written
        stop_with_resume_command(setup.directory, settings, deadline, world) as stops,
        SnapshotManager(
            setup.directory,
            engine,
            spec,
            retention,
            setup.record,
            recorder.sync,
            base_files=None if base is None else base.digests,
            world=world.for_thread(PRACTICALLY_FOREVER),
        ) as manager,
    ):
        events = train(
            engine, spec, loader.train, lambda epoch: stops.until_stopped(loader.test(epoch)), setup.position
        )
        followed = page.follow(save_and_stop(events, manager, stops))
        last = recorder.record(followed, lambda: stops.request is not None)
        if manager.stops_early:
            recorder.print_status(f"stopped early at step {last.step} of {spec.steps}: {manager.stops_early}")
    page.end(engine)
    return last, manager.stops_early


def _train_spec(settings: TrainConfig, loader: BatchLoader) -> TrainSpec:
    return TrainSpec(
        steps=train_steps(settings, loader),
        steps_per_epoch=loader.steps_per_epoch,
        lr=settings.optimizer["lr"],
        lr_schedule=instantiate(settings.lr_schedule, "lr_schedule", settings.allow),
        seed=settings.seed,
        measure_every=settings.log.every,
        eval_batches=loader.eval_batches,
        eval_every=settings.eval_every,
        early_stop=_early_stop(settings),
    )


def _early_stop(settings: TrainConfig) -> EarlyStop | None:
    stop, monitor = settings.early_stop, settings.snapshot.monitor
    if stop.patience is None:
        return None
    assert monitor is not None, "the configuration was checked"
    return EarlyStop(monitor, stop.patience, stop.min_delta)


def _retention(settings: TrainConfig) -> Retention:
    every = settings.snapshot.every
    return Retention(None if every == "epoch" else every, settings.snapshot.keep, settings.snapshot.monitor)


def _restore(engine: Engine, resumed: ResumedRun | None, memory_cure: str) -> None:
    if resumed is None or resumed.snapshot is None:
        return
    try:
        with report_out_of_memory("loading the snapshot", memory_cure):
            engine.load_state(resumed.state_for(engine.module))
    except RunError as error:
        raise RunError(f"{resumed.snapshot.path}: {error}") from error


def _recorder(
    settings: TrainConfig,
    spec: TrainSpec,
    setup: RunSetup,
    world: World,
    logger: GuardedLogger,
    partitions: Rows,
) -> AbstractContextManager[Recorder]:
    if world.is_rank_zero:
        return RunRecorder.open(
            setup.directory, spec, settings.log, setup.position, logger=logger, partitions=partitions
        )
    return RankRecorder.open(setup.directory, world.rank, settings.log, setup.position)


def _record_start(
    recorder: Recorder,
    settings: TrainConfig,
    setup: RunSetup,
    warning: str | None,
    parts: RunParts,
    partitions: Rows,
) -> None:
    partitioning = parts.partitioning
    recorder.print_status(f"run directory: {setup.directory}")
    for message in (*setup.messages, *parts.made.lines):
        recorder.print_status(message)
    if settings.chunks > settings.batch_size:
        recorder.print_status(
            f"chunks={settings.chunks} is more than batch_size={settings.batch_size}: "
            f"each mini-batch is split into {settings.batch_size} micro-batches"
        )
    if settings.ema is not None:
        recorder.print_status(f"ema={settings.ema:g}: evaluations and snapshots use the averaged weights")
    if warning is not None:
        recorder.print_status(warning)
    partitioning.print_origin(recorder.print_status)
    for row, cost in zip(partitions, partitioning.balanced.sums, strict=True):
        recorder.log.write(
            "partition %(partition)d on %(device)s: layers %(first)s to %(last)s (%(layers)d), "
            "%(parameters)d parameters, cost %(cost).6g %(unit)s",
            {**row, "cost": cost, "unit": partitioning.balanced.unit},
        )


def _dry_run(settings: TrainConfig, job: Job, parts: RunParts, steps: int) -> Summary:
    """Print layers, partitions and estimated memory without running or writing anything."""
    layers: list[dict[str, Any]] = []
    memory: list[dict[str, int]] = []
    partitions = parts.partitions
    facts = _model_facts(settings, parts)
    if facts is not None:
        balance = parts.partitioning.balance
        layers = flop_rows(facts, balance)
        boundaries = [facts.partition_input(begin, end) for begin, end in pairwise([0, *accumulate(balance)])]
        partitions = [
            {**row, "input_shapes": boundary.shapes, "input_bytes": boundary.bytes}
            for row, boundary in zip(partitions, boundaries, strict=True)
        ]
        estimates = partition_memory(
            parts.model,
            facts,
            balance,
            parts.partitioning.spec,
            optimizer_factory(settings, parts.model),
            kept_state(settings),
        )
        memory = [{**asdict(estimate), "total_bytes": estimate.total_bytes} for estimate in estimates]
    parts.made.print_notes()
    parts.partitioning.print_origin()
    if not job.json:
        if layers:
            print_layers(layers, sort="order", top=None)
        print_partitions(partitions)
        if memory:
            print_partition_memory(memory)
        print_facts("", {"steps": steps})
    if memory:
        partitions = [{**row, **sizes} for row, sizes in zip(partitions, memory, strict=True)]
    return {
        "layers": layers,
        "partitions": partitions,
        "steps": steps,
        **parts.made.notes,
        "command": job.line,
    }


def _model_facts(settings: TrainConfig, parts: RunParts) -> ModelStats | None:
    """Shapes and sizes of every layer, or None if a layer depends on values and the model has none."""
    try:
        with autocast_of(settings):
            return model_stats(parts.model, make_sample(settings, parts.loader))
    except ConfigError as error:
        print_status(f"shapes and memory are unknown: {error}")
        return None
