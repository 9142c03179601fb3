"""gpipe train plan=auto: the best plan becomes the settings of the run, and of its saved configuration.

So a resumed run goes on with the plan it began with, and `config.yaml` says which one that was.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from gpipe_cli.config.schema import PlanSearchConfig, ScheduleConfig, TrainConfig
from gpipe_cli.config.targets import add_current_folder
from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.advice import advice
from gpipe_cli.plan.prediction import Prediction
from gpipe_cli.report.output import say
from gpipe_cli.run.build import check_components, make_model, uses_partitions
from gpipe_cli.run.data import make_feed
from gpipe_cli.run.job import Job
from gpipe_cli.run.planning import Planner
from gpipe_cli.run.rank_setup import is_rank

__all__ = ["with_best_plan"]

BESIDE = 5
"""How many plans are compared: the plain run should be among them, for the word about it."""


def with_best_plan(settings: TrainConfig, job: Job) -> tuple[TrainConfig, Job]:
    if is_rank():
        raise ConfigError(
            "plan=auto: every process that torchrun started would plan for itself; "
            "run gpipe plan once and give the line it prints"
        )
    if job.dry_run:
        raise ConfigError("plan=auto: measures, and --dry-run runs nothing; leave one of them out")
    if not uses_partitions(settings):
        raise ConfigError(
            "plan=auto: has no effect with engine=single, which has no partitions; leave it out"
        )
    if any(word.lstrip("+").startswith(("balance=", "balance.")) for word in job.overrides):
        raise ConfigError("balance: plan=auto searches for it; leave one of them out")
    add_current_folder(settings.allow)
    check_components(settings, job.overrides)
    feed = make_feed(settings)
    planner = Planner(settings, job.overrides, feed, make_model(settings, feed))
    planned = planner.plan(keep=BESIDE)
    best = planned.plans[0]
    say(f"plan ({planned.origin}): {best.step_ms:.1f} ms per step predicted; {advice(planned.plans)}")
    say(f"plan: {best.overrides}")
    devices = [str(one) for one in planner.devices[: best.shape.devices]]
    return _settled(settings, best, devices), _saved(job, best, devices)


def _settled(settings: TrainConfig, plan: Prediction, devices: list[str]) -> TrainConfig:
    return replace(
        settings,
        balance=_balance(plan),
        chunks=plan.shape.chunks,
        schedule=ScheduleConfig(plan.shape.schedule),
        checkpoint=plan.checkpoint,
        devices=devices,
        partitions=plan.shape.partitions,
        plan=PlanSearchConfig(auto=False),
    )


def _saved(job: Job, plan: Prediction, devices: list[str]) -> Job:
    tree = copy.deepcopy(job.tree)
    OmegaConf.set_struct(tree, False)
    chosen = {
        "balance": _balance(plan),
        "chunks": plan.shape.chunks,
        "schedule.name": plan.shape.schedule,
        "checkpoint": plan.checkpoint,
        "partitions": plan.shape.partitions,
        "devices": devices,
        "plan.auto": False,
    }
    for key, value in chosen.items():
        OmegaConf.update(tree, key, value, merge=False)
    return replace(job, tree=tree)


def _balance(plan: Prediction) -> dict[str, Any]:
    return {"_target_": "gpipe_cli.balance.manual.balance", "layers": list(plan.balance)}
