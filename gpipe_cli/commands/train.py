"""gpipe train: data, model, partitions, engine, loop, in this order."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gpipe_cli.commands.assemble import Assembly, assemble, make_engine
from gpipe_cli.commands.feed import Feed
from gpipe_cli.commands.jobs import Job, Summary
from gpipe_cli.commands.journal import Journal
from gpipe_cli.commands.outlook import outlook
from gpipe_cli.config.schema import Train
from gpipe_cli.config.targets import instantiate
from gpipe_cli.report.environment import environment
from gpipe_cli.report.tables import print_facts
from gpipe_cli.training.interrupts import interrupts
from gpipe_cli.training.loop import Evaluated, Plan, train
from gpipe_cli.training.run_directory import check_run_dir, make_run_directory, write_json
from gpipe_cli.training.snapshot import save_weights


def run(settings: Train, job: Job) -> Summary:
    check_run_dir(settings.run_dir, job.number)
    parts = assemble(settings, job.overrides, storage=not job.dry_run)
    feed = parts.feed
    plan = _plan(settings, feed)
    if job.dry_run:
        return outlook(settings, job, parts, plan.steps)

    engine = make_engine(settings, parts)
    try:
        directory = make_run_directory(settings.run_dir, job.command, job.model, job.number)
        _write_origin(directory, job)
        with Journal.open(directory, plan, settings.log) as journal, interrupts() as ctrl_c:
            journal.say(f"run directory: {directory}")
            _tell_balance(journal, parts)
            if settings.chunks > settings.batch_size:
                journal.say(
                    f"chunks={settings.chunks} is more than batch_size={settings.batch_size}: "
                    f"a mini-batch makes {settings.batch_size} micro-batches"
                )
            began = time.perf_counter()
            facts = train(engine, plan, feed.train, lambda epoch: ctrl_c.heeded(feed.test(epoch)))
            last = journal.follow(ctrl_c.heeded(facts))
            save_weights(engine.module, directory, last.step)
            summary = _summary(last, plan, feed, time.perf_counter() - began, directory, job)
            write_json(directory / "summary.json", summary)
    finally:
        engine.close()
    if job.shows_result:
        print_facts("", {**summary, "evaluate": _evaluation(directory, settings)})
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


def _evaluation(directory: Path, settings: Train) -> str:
    """What a newcomer would type next; trust in a package is given anew each time."""
    allow = [f"allow=[{','.join(settings.allow)}]"] if settings.allow else []
    return shlex.join(["gpipe", "eval", f"run={directory}", *allow])


def _plan(settings: Train, feed: Feed) -> Plan:
    return Plan(
        steps=settings.steps or settings.epochs * feed.steps_per_epoch,
        steps_per_epoch=feed.steps_per_epoch,
        lr=settings.optimizer["lr"],
        lr_schedule=instantiate(settings.lr_schedule, "lr_schedule", settings.allow),
        seed=settings.seed,
    )


def _write_origin(directory: Path, job: Job) -> None:
    """Where the run came from: enough to repeat it."""
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(job.tree), encoding="utf-8")
    (directory / "overrides.yaml").write_text(OmegaConf.to_yaml(list(job.overrides)), encoding="utf-8")
    write_json(directory / "env.json", environment())


def _summary(
    last: Evaluated, plan: Plan, feed: Feed, seconds: float, directory: Path, job: Job
) -> dict[str, Any]:
    return {
        "loss": last.loss,
        **last.means,
        "epochs": plan.epochs,
        "steps": last.step,
        "samples_per_second": feed.samples_after(last.step) / seconds,
        "seconds": seconds,
        "run_dir": str(directory),
        "command": job.line,
    }
