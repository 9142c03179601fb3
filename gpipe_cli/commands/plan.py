"""gpipe plan: search for the best ways to train a model on some devices, and print the command that uses the best.

It measures the model here, or estimates for devices that are elsewhere. It writes only the cache of measurements.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpipe_cli.accelerator.determinism import deterministic_algorithms
from gpipe_cli.accelerator.devices import available_cores
from gpipe_cli.build.components import check_components
from gpipe_cli.build.fit import with_least_rows
from gpipe_cli.build.loader import make_loader
from gpipe_cli.build.model import build_on_meta, make_model
from gpipe_cli.build.step import make_loss
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import PlanConfig
from gpipe_cli.config.targets import add_current_folder
from gpipe_cli.config.words import sets_key
from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.estimated import estimated_devices
from gpipe_cli.plan.measured import verify_plans
from gpipe_cli.plan.planner import Planned, Planner
from gpipe_cli.plan.prediction import OFFLOAD, Prediction, advice, best_and_plain, by_recommendation
from gpipe_cli.plan.step_time import MAX_SIMULATED_ACTIONS
from gpipe_cli.profiling.timeline import StepTimeline
from gpipe_cli.report.model_tables import print_device_memory, print_plans
from gpipe_cli.report.output import print_status
from gpipe_cli.report.page.plan_page import plan_page
from gpipe_cli.report.page.render import check_replaceable
from gpipe_cli.report.tables import print_facts
from gpipe_cli.report.trace import print_step_timeline
from gpipe_cli.runs.directory import write_text
from gpipe_cli.values import format_bytes

# Keys that the printed train command does not repeat: they belong to gpipe plan, or the plan sets them.
OWN_KEYS = ("plan", "device", "devices", "verify", "top", "device_memory", "tensor_cores", "page")
PLANNED_KEYS = ("chunks", "schedule", "checkpoint", "partitions")
ON_PAGE = 24
"""How many plans a page compares."""
MAX_PICTURE = 16
"""Devices; a picture with more is unreadable."""


def run(settings: PlanConfig, job: Job) -> Summary:
    with deterministic_algorithms(enabled=settings.deterministic):
        return _plan(settings, job)


def _plan(settings: PlanConfig, job: Job) -> Summary:
    if job.dry_run:
        raise ConfigError("--dry-run: gpipe plan changes nothing and writes nothing; remove it")
    if sets_key(job.overrides, "balance"):
        raise ConfigError("balance: gpipe plan searches for it; remove it, or use gpipe profile to see one")
    page = None if settings.page is None else Path(settings.page)
    if page is not None:
        check_replaceable("page", page)
    add_current_folder(settings.allow)
    check_components(settings, job.overrides)
    loader = make_loader(settings)

    estimated = estimated_devices(settings)
    if estimated is None:
        made = make_model(settings, loader)
        made.print_notes()
        model = made.sequence
    else:
        model = build_on_meta(lambda: make_model(settings, loader, load=False).sequence)
    loader = with_least_rows(settings, loader, model)
    for note in loader.notes:
        print_status(note)
    # The jobs of a sweep began together, but each has the whole budget.
    began = job.began if not job.in_sweep else time.monotonic()
    planner = Planner(settings, job.overrides, loader, model, began)
    if settings.verify and not planner.can_be_run:
        raise ConfigError(
            f"verify=true: devices={settings.devices} means machines that are not here; give a list"
        )
    planned = planner.plan(keep=settings.top if settings.page is None else max(settings.top, ON_PAGE))
    plans = planned.plans
    if settings.verify and plans[0].engine == OFFLOAD:
        print_status("verify=true: gpipe plan runs pipelines only, so engine=offload is not verified")
    elif settings.verify:
        verified = verify_plans(
            plans,
            model,
            planner.batch,
            make_loss(settings),
            planner.devices,
            cores=available_cores(),
            seconds=settings.plan.verify_budget,
        )
        plans = by_recommendation(verified)
    summary = _summary(settings, plans, planned, job)
    if estimated is not None:
        summary["figures"] = dict(estimated.checked)
    step = _step(plans[0], planned.cores)
    if page is not None:
        write_text(page, plan_page(summary, step))
    shown = {**summary, "candidates": [plan.record() for plan in best_and_plain(plans, settings.top)]}
    if job.shows_result:
        _print(plans[0], planned, shown, step)
    return {**shown, **({} if page is None else {"page": str(page)})}


def _step(best: Prediction, cores: int | None) -> StepTimeline | None:
    """The best plan's, unless a picture of it would be unreadable."""
    if best.engine == OFFLOAD:
        return None
    if best.shape.actions > MAX_SIMULATED_ACTIONS or best.shape.devices > MAX_PICTURE:
        return None
    return StepTimeline.simulated(best.shape.spec(cores).simulate(best.parts))


def _train_command(settings: PlanConfig, best: Prediction, job: Job) -> str:
    # torch itself decides about tf32, so gpipe train has no such precision.
    own = (*OWN_KEYS, "precision") if settings.precision == "tf32" else OWN_KEYS
    command = job.train_command(without=(*own, *PLANNED_KEYS))
    if settings.data_parallel == 1:
        return f"{command} {best.overrides}"
    devices = best.shape.devices * settings.data_parallel
    return f"{command} {best.replica_overrides} engine=processes devices={devices}"


def _summary(settings: PlanConfig, plans: Sequence[Prediction], planned: Planned, job: Job) -> dict[str, Any]:
    searched, command = planned.searched, _train_command(settings, plans[0], job)
    # An order that was searched for may be shorter than all schedules allow, whether it is recommended or not.
    alike = [plan.lower_bound_ms for plan in plans if plan.batch_size == plans[0].batch_size]
    bound = min(searched.lower_bound_ms, *alike)
    errors = [abs(plan.error) for plan in plans if plan.error is not None]
    return {
        "best": plans[0].record(),
        "candidates": [plan.record() for plan in plans],
        "profile": planned.origin,
        "lower_bound": bound,
        "gap": 1 - bound / plans[0].step_ms,
        "memory_curve": [asdict(point) for point in planned.memory_curve],
        "advice": advice(plans),
        "too_large": searched.too_large,
        "left_out": searched.left_out,
        "chunks_left_out": planned.skipped_chunks,
        "coverage": None if planned.coverage is None else asdict(planned.coverage),
        "plain_bytes_too_large": planned.plain_bytes,
        **({"largest_error": max(errors)} if errors else {}),
        "train_command": command,
        "paste": command,  # its former name, for one release
        "command": job.line,
    }


def _curve_text(curve: Sequence[dict[str, float]]) -> str:
    """The bubble of searched orders that may keep some share of what the usual schedule keeps."""
    points = (f"{point['share']:.2g} x {100 * point['bubble']:.1f} %" for point in curve)
    usual = format_bytes(curve[-1]["bytes"] / curve[-1]["share"])
    return f"{', '.join(points)} (1 x is {usual} of activations, as 1f1b or interleaved keeps)"


def _print(best: Prediction, planned: Planned, summary: dict[str, Any], step: StepTimeline | None) -> None:
    print_plans(f"the best plans ({planned.origin})", summary["candidates"])
    print_device_memory(summary["best"]["memory"])
    if step is not None:
        print_step_timeline(f"predicted: {best.step_ms:.1f} ms", step, step.seconds)
    if planned.coverage is not None and not planned.coverage.is_complete:
        print_status(f"the time ran out: {planned.coverage}")
    if planned.rejected_chunks:
        print_status(
            f"not searched: chunks={planned.rejected_chunks}, whose micro-batches are too small for the model or too "
            "large for the devices"
        )
    if planned.plain_bytes is not None:
        print_status(
            f"without a pipeline, one device would need at least {format_bytes(planned.plain_bytes)}, which does not "
            "fit"
        )
    facts = {
        **{f"figures of {name}": checked for name, checked in summary.get("figures", {}).items()},
        "lower bound": f"{summary['lower_bound']:.4g} ms, {100 * summary['gap']:.2f} % below the best plan",
        **({"bubble by memory": _curve_text(summary["memory_curve"])} if summary["memory_curve"] else {}),
        "advice": summary["advice"],
        "train_command": summary["train_command"],
    }
    print_facts("", facts)
