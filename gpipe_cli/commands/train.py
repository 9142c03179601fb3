"""gpipe train: data, model, partitions, engine, loop, in this order; a new run, or one that goes on."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

from gpipe_cli.commands.assemble import Assembly, assemble, make_engine
from gpipe_cli.commands.feed import Feed
from gpipe_cli.commands.jobs import Job, Summary
from gpipe_cli.commands.journal import Journal
from gpipe_cli.commands.origin import Begun, begin_run
from gpipe_cli.commands.outcome import finished_before, show, summary_of, write_summary
from gpipe_cli.commands.outlook import outlook
from gpipe_cli.commands.planned_run import with_best_plan
from gpipe_cli.commands.resume import Resumed, check_plan, resumption
from gpipe_cli.commands.room import check_room
from gpipe_cli.commands.stopping import stopping
from gpipe_cli.config.durations import seconds
from gpipe_cli.config.schema import Train
from gpipe_cli.config.targets import instantiate
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import RunError
from gpipe_cli.training.loop import Evaluated, Plan, Position, train
from gpipe_cli.training.run_directory import check_run_dir, planned_run_directory
from gpipe_cli.training.snapshot.keeper import Keeper, Retention
from gpipe_cli.training.survival import survive


def run(settings: Train, job: Job) -> Summary:
    began = time.monotonic()
    with ExitStack() as held:
        again = resumption(settings, job, held)
        if again is None:
            check_run_dir(settings.run_dir, job.number)
        settings = replace(settings, resume=None) if again is None else again.settings
        if settings.plan.auto:
            settings, job = with_best_plan(settings, job)
        parts = assemble(settings, job.overrides, storage=not job.dry_run)
        plan = _plan(settings, parts.feed)
        if again is not None and again.snapshot is not None:
            check_plan(plan, again.snapshot.record)
        if job.dry_run:
            return outlook(settings, job, parts, plan.steps)
        summary = None if again is None else finished_before(again, plan, parts.feed, job)
        if summary is None:
            engine = make_engine(settings, parts)
            held.callback(engine.close)
            _restore(engine, again)
            place = planned_run_directory(settings.run_dir, job.number) if again is None else again.run
            warning = check_room(place, settings, parts.model, plan, _retention(settings))
            begun = begin_run(settings, job, again, held)
            again = None  # it holds the whole snapshot in memory
            last = _train(settings, parts, plan, engine, begun, began, warning)
            summary = summary_of(last, plan, parts.feed, begun.directory, job)
            write_summary(begun.directory, summary)
    if job.shows_result:
        show(summary, settings)
    return summary


def _tell_balance(journal: Journal, parts: Assembly) -> None:
    """The partitions to the log; to the person as well where they were found by measuring."""
    if parts.split.origin:
        journal.say(f"balance {parts.split.balance}: {parts.split.origin}")
    for row, cost in zip(parts.partitions, parts.split.balanced.sums, strict=True):
        journal.log.info(
            "partition %(partition)d on %(device)s: layers %(first)s to %(last)s (%(layers)d), "
            "%(parameters)d parameters, cost %(cost).6g %(unit)s",
            {**row, "cost": cost, "unit": parts.split.balanced.unit},
        )


def _restore(engine: Engine, again: Resumed | None) -> None:
    if again is None or again.snapshot is None:
        return
    try:
        engine.load_state(again.snapshot.state)
    except RunError as error:
        raise RunError(f"{again.snapshot.path}: {error}") from error


def _train(
    settings: Train,
    parts: Assembly,
    plan: Plan,
    engine: Engine,
    begun: Begun,
    began: float,
    warning: str | None,
) -> Evaluated:
    """began: when the command did, for its time limit."""
    feed, directory, record = parts.feed, begun.directory, begun.record
    start = Position() if record is None else record.position
    limit = seconds(settings.time_limit) if settings.time_limit else None
    with Journal.open(directory, plan, settings.log, start) as journal:
        _tell(journal, settings, begun)
        if warning is not None:
            journal.say(warning)
        _tell_balance(journal, parts)
        retention = _retention(settings)
        with (
            stopping(directory, settings, None if limit is None else began + limit) as stops,
            Keeper(directory, engine, plan, retention, record, journal.metrics.sync) as keeper,
        ):
            facts = train(engine, plan, feed.train, lambda epoch: stops.heeded(feed.test(epoch)), start)
            return journal.follow(survive(facts, keeper, stops))


def _tell(journal: Journal, settings: Train, begun: Begun) -> None:
    for line in (f"run directory: {begun.directory}", *begun.news):
        journal.say(line)
    if settings.chunks > settings.batch_size:
        journal.say(
            f"chunks={settings.chunks} is more than batch_size={settings.batch_size}: "
            f"a mini-batch makes {settings.batch_size} micro-batches"
        )


def _retention(settings: Train) -> Retention:
    every = settings.snapshot.every
    return Retention(None if every == "epoch" else every, settings.snapshot.keep, settings.snapshot.monitor)


def _plan(settings: Train, feed: Feed) -> Plan:
    return Plan(
        steps=settings.steps or settings.epochs * feed.steps_per_epoch,
        steps_per_epoch=feed.steps_per_epoch,
        lr=settings.optimizer["lr"],
        lr_schedule=instantiate(settings.lr_schedule, "lr_schedule", settings.allow),
        seed=settings.seed,
    )
