"""gpipe train plan=auto: the best plan becomes part of the settings and of the saved config.yaml.

A resumed run therefore continues with the plan that it started with.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from gpipe_cli.build.components import check_components, engine_name, manual_balance, traits_of_engine
from gpipe_cli.build.fit import with_least_rows
from gpipe_cli.build.loader import make_loader
from gpipe_cli.build.model import make_model
from gpipe_cli.config.job import Job
from gpipe_cli.config.schema import AutoPlanConfig, ScheduleConfig, TrainConfig
from gpipe_cli.config.targets import add_current_folder
from gpipe_cli.config.words import sets_key
from gpipe_cli.errors import ConfigError
from gpipe_cli.launch.rank import is_rank
from gpipe_cli.plan.prediction import OFFLOAD, advice
from gpipe_cli.report.output import print_status
from gpipe_cli.run.planning import Planner
from gpipe_cli.schedule.orders import AUTO

NO_PLAN = AutoPlanConfig()
PLANS = 5
"""How many plans to keep: the advice compares the best one with the run on a single device, if that is among them."""


def with_best_plan(settings: TrainConfig, job: Job) -> tuple[TrainConfig, Job]:
    """Search for the best plan; return the settings and the job with the configuration that contain it."""
    if is_rank():
        raise ConfigError(
            "plan=auto: every process that torchrun started would search for its own plan; "
            "run gpipe plan once and use the command it prints"
        )
    if job.dry_run:
        raise ConfigError("plan=auto: measures the model, and --dry-run runs nothing; leave one of them out")
    if not traits_of_engine(settings).has_partitions:
        raise ConfigError(
            f"plan=auto: has no effect with {engine_name(settings)}, which has no partitions; leave it out"
        )
    if sets_key(job.overrides, "balance"):
        raise ConfigError("balance: plan=auto searches for it; leave one of them out")
    add_current_folder(settings.allow)
    check_components(settings, job.overrides)
    loader = make_loader(settings)
    model = make_model(settings, loader, initial_weights=settings.resume is None).sequence
    loader = with_least_rows(settings, loader, model)
    began = job.began if not job.in_sweep else time.monotonic()
    planner = Planner(settings, job.overrides, loader, model, began)
    planned = planner.plan(keep=PLANS)
    best = planned.plans[0]
    if best.engine == OFFLOAD:
        raise ConfigError(f"plan=auto: {advice(planned.plans)}; train with {best.overrides}")
    print_status(
        f"plan ({planned.origin}): {best.step_ms:.1f} ms per step predicted; {advice(planned.plans)}"
    )
    print_status(f"plan: {best.overrides}")
    shape = best.shape
    devices = [str(device) for device in planner.devices[: shape.devices]]
    keys: dict[str, Any] = {
        "balance": manual_balance(best.balance),
        "chunks": shape.chunks,
        "checkpoint": best.checkpoint,
        "partitions": shape.partitions,
        "devices": devices,
    }
    if shape.schedule_name == AUTO and best.device_memory is not None:
        # The run searches for the order again, and must keep to the same limit.
        keys["device_memory"] = best.device_memory
    tree = copy.deepcopy(job.tree)
    OmegaConf.set_struct(tree, False)
    for key, value in {**keys, "schedule.name": shape.schedule_name, "plan": NO_PLAN}.items():
        OmegaConf.update(tree, key, value, merge=False)
    settings = replace(settings, **keys, schedule=ScheduleConfig(shape.schedule_name), plan=NO_PLAN)
    return settings, replace(job, tree=tree)
