"""What happens to the learning rate when a run is resumed to train longer than planned: a line for the user.

A learning-rate schedule spans all steps of a run. With more steps it is stretched, so a rate that had decayed rises
again, which surprises a user who wanted the same run to continue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.instantiate import instantiate
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.config.words import sets_key
from gpipe_cli.errors import ConfigError
from gpipe_cli.training.loop import TrainSpec

_EQUAL = 1e-6
"""Rates that differ by a smaller fraction are called equal."""


def lr_line(
    saved: DictConfig, settings: TrainConfig, now: TrainSpec, step: int, overrides: Sequence[str]
) -> str | None:
    """How the learning rate of a run resumed at `step` differs from what its saved settings planned; None if equal."""
    before = _saved_spec(saved, settings, now)
    if before is None or not 0 < step < now.steps:
        return None
    old, new = before.lr_at(min(step, before.steps - 1)), now.lr_at(step)
    if math.isclose(old, new, rel_tol=_EQUAL):
        return None
    given = sets_key(overrides, "lr_schedule") or before.lr != now.lr
    why = f"{_name(settings)} now spans {now.steps} steps instead of {before.steps}, so "
    course = (
        f"it goes from {before.lr_at(step - 1):.3g} to {new:.3g} and ends at {now.lr_at(now.steps - 1):.3g}"
    )
    return f"learning rate: {'' if given else why}{course}{'' if given else _offer(old)}"


def longer_line(settings: TrainConfig, spec_steps: int, longer_steps: int) -> str | None:
    """What the rate does if a run that has made `spec_steps` is resumed with more; None if it stays."""
    schedule = instantiate(settings.lr_schedule, "lr_schedule", settings.allow)
    lr = settings.optimizer["lr"]
    old, new = (
        lr * schedule.factor(spec_steps - 1, spec_steps),
        lr * schedule.factor(spec_steps, longer_steps),
    )
    if math.isclose(old, new, rel_tol=_EQUAL):
        return None
    return f"then goes from {old:.3g} to {new:.3g}, because {_name(settings)} spans all steps{_offer(old)}"


def _offer(lr: float) -> str:
    return f"; to keep the last rate instead, add lr_schedule=constant optimizer.lr={lr:.3g}"


def _name(settings: TrainConfig) -> str:
    """`OneCycle` as it is written on the command line: one_cycle."""
    name = str(settings.lr_schedule["_target_"]).rpartition(".")[2]
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def _saved_spec(saved: DictConfig, settings: TrainConfig, now: TrainSpec) -> TrainSpec | None:
    """The plan of the run before this launch; None if its settings cannot be read any more."""
    try:
        tree: Any = OmegaConf.to_container(saved, resolve=True)
        match tree:
            case {
                "epochs": int(epochs),
                "optimizer": {"lr": float(lr) | int(lr)},
                "lr_schedule": Mapping() as node,
            }:
                schedule = instantiate(node, "lr_schedule", settings.allow)
                steps = tree.get("steps") or epochs * now.steps_per_epoch
                return replace(now, steps=int(steps), lr=lr, lr_schedule=schedule)
    except (ConfigError, ValueError, TypeError):  # a line for the user is not worth an error
        return None
    return None
