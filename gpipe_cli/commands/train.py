"""gpipe train: data, model, partitions, engine, loop, in this order; a new run, or one that goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from gpipe_cli.commands.report import leave_page
from gpipe_cli.config.durations import seconds
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.config.targets import instantiate
from gpipe_cli.distributed.team import Team
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import RunError
from gpipe_cli.report.progress import on_terminal
from gpipe_cli.run.auto_plan import with_best_plan
from gpipe_cli.run.build import Split, make_engine, runs_in_ranks
from gpipe_cli.run.data import Feed
from gpipe_cli.run.dry_run import outlook
from gpipe_cli.run.follower import Follower
from gpipe_cli.run.job import Job, Summary
from gpipe_cli.run.launch_record import launch_of, write_launch
from gpipe_cli.run.launcher import launched
from gpipe_cli.run.rank_setup import as_rank, assemble_together, joined, leads, starts_ranks, watched
from gpipe_cli.run.recorder import Journal
from gpipe_cli.run.relay import Relay
from gpipe_cli.run.resume import Resumed, agree_on_snapshot, check_plan, resumption
from gpipe_cli.run.room import check_room
from gpipe_cli.run.setup import Begun, begin_together
from gpipe_cli.run.stopping import stopping
from gpipe_cli.run.summary import finished_before, show, summary_of, write_summary
from gpipe_cli.training.loop import Evaluated, Plan, train
from gpipe_cli.training.run_directory import check_run_dir, planned_run_directory
from gpipe_cli.training.signals import stopped_at_boundaries
from gpipe_cli.training.snapshot.keeper import Keeper, Retention
from gpipe_cli.training.survival import survive

Rows = Sequence[Mapping[str, Any]]


def run(settings: TrainConfig, job: Job) -> Summary:
    began = time.monotonic() if job.rank is None else job.rank.began
    with ExitStack() as held:
        again = resumption(settings, job, held, writes=leads())
        if again is None and leads():
            check_run_dir(settings.run_dir, job.number)
        settings = replace(settings, resume=None) if again is None else again.settings
        if settings.plan.auto:
            settings, job = with_best_plan(settings, job)
        settings = as_rank(settings, job)
        team = held.enter_context(joined(settings, job))
        agree_on_snapshot(again, team)
        parts = assemble_together(settings, job, team)
        plan = _plan(settings, parts.feed)
        if again is not None and again.snapshot is not None:
            check_plan(plan, again.snapshot.record)
        if job.dry_run:
            return outlook(settings, job, parts, plan.steps)
        summary = None if again is None else finished_before(again, plan, parts.feed, job)
        place = planned_run_directory(settings.run_dir, job.number) if again is None else again.run
        room = partial(check_room, place, settings, parts.model, plan, _retention(settings))
        # An engine may take room of its own on that disk; one of several processes keeps a part of the model only.
        warning = room() if summary is None and runs_in_ranks(settings) else None
        if summary is None and starts_ranks(settings):
            again = None
            held.close()  # of the two, rank 0 is the writer
            summary = launched(settings, job, parts, began)
        elif summary is None:
            relay = Relay(settings)
            # Before there is an engine: one of several processes keeps a part of the model only.
            launch = launch_of(settings, job, parts, resumed=None if again is None else again.run)
            engine = watched(make_engine(settings, parts, gauged=on_terminal()), job, team)
            held.callback(engine.close)
            warning = warning if runs_in_ranks(settings) else room()
            _restore(engine, again)
            # From here on a stop waits for the first step: the run has a directory, and something to save.
            held.enter_context(stopped_at_boundaries())
            begun = begin_together(settings, job, again, held, team)
            if team.leads:
                write_launch(begun.directory, launch)
                held.callback(leave_page, begun.directory)  # however the run ends
                held.enter_context(relay.opened(begun, job))
            again = None  # it holds the whole snapshot in memory
            with _journal(settings, plan, begun, team, relay, launch["partitions"]) as journal:
                _tell(journal, settings, begun, warning)
                _tell_balance(journal, parts.split, launch["partitions"])
                last = _train(settings, parts.feed, plan, engine, begun, began, journal, team)
            summary = summary_of(last, plan, parts.feed, begun.directory, job)
            if team.leads:
                write_summary(begun.directory, summary)
    if job.shows_result and leads():
        show(summary, settings)
    return summary


def _journal(
    settings: TrainConfig, plan: Plan, begun: Begun, team: Team, relay: Relay, partitions: Rows
) -> AbstractContextManager[Journal | Follower]:
    if team.leads:
        directory, start = begun.directory, begun.position
        return Journal.open(directory, plan, settings.log, start, relay=relay, partitions=partitions)
    return Follower.open(begun.directory, team.rank, settings.log, begun.position)


def _tell_balance(journal: Journal | Follower, split: Split, partitions: Rows) -> None:
    """The partitions to the log; to the person as well where they were found by measuring."""
    if split.origin:
        journal.say(f"balance {split.balance}: {split.origin}")
    for row, cost in zip(partitions, split.balanced.sums, strict=True):
        journal.log.info(
            "partition %(partition)d on %(device)s: layers %(first)s to %(last)s (%(layers)d), "
            "%(parameters)d parameters, cost %(cost).6g %(unit)s",
            {**row, "cost": cost, "unit": split.balanced.unit},
        )


def _restore(engine: Engine, again: Resumed | None) -> None:
    if again is None or again.snapshot is None:
        return
    try:
        engine.load_state(again.snapshot.state)
    except RunError as error:
        raise RunError(f"{again.snapshot.path}: {error}") from error


def _train(
    settings: TrainConfig,
    feed: Feed,
    plan: Plan,
    engine: Engine,
    begun: Begun,
    began: float,
    journal: Journal | Follower,
    team: Team,
) -> Evaluated:
    """began: when the command did, for its time limit."""
    limit = seconds(settings.time_limit) if settings.time_limit else None
    deadline = None if limit is None else began + limit
    with (
        stopping(begun.directory, settings, deadline, team) as stops,
        Keeper(
            begun.directory,
            engine,
            plan,
            _retention(settings),
            begun.record,
            journal.sync,
            writes=team.leads,
        ) as keeper,
    ):
        facts = train(engine, plan, feed.train, lambda epoch: stops.heeded(feed.test(epoch)), begun.position)
        return journal.follow(survive(facts, keeper, stops))


def _tell(journal: Journal | Follower, settings: TrainConfig, begun: Begun, warning: str | None) -> None:
    for line in (f"run directory: {begun.directory}", *begun.news):
        journal.say(line)
    if settings.chunks > settings.batch_size:
        journal.say(
            f"chunks={settings.chunks} is more than batch_size={settings.batch_size}: "
            f"a mini-batch makes {settings.batch_size} micro-batches"
        )
    if warning is not None:
        journal.say(warning)


def _retention(settings: TrainConfig) -> Retention:
    every = settings.snapshot.every
    return Retention(None if every == "epoch" else every, settings.snapshot.keep, settings.snapshot.monitor)


def _plan(settings: TrainConfig, feed: Feed) -> Plan:
    return Plan(
        steps=settings.steps or settings.epochs * feed.steps_per_epoch,
        steps_per_epoch=feed.steps_per_epoch,
        lr=settings.optimizer["lr"],
        lr_schedule=instantiate(settings.lr_schedule, "lr_schedule", settings.allow),
        seed=settings.seed,
    )
