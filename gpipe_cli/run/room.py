"""Whether a run's disk has room for what it will save, asked before the run has a directory."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.engines.state import module_state
from gpipe_cli.profiling.optimizer_state import state_bytes
from gpipe_cli.run.pipeline_spec import optimizer_factory
from gpipe_cli.training.loop import Plan
from gpipe_cli.training.snapshot.keeper import Retention
from gpipe_cli.training.snapshot.space import check_space


def check_room(
    run: Path, settings: TrainConfig, model: nn.Module, plan: Plan, retention: Retention
) -> str | None:
    """What is to be said about the room for snapshots, if anything; none for a single one is an error."""
    state = module_state(model)
    size = sum(one.nbytes for one in (*state.model.values(), *state.buffers.values()))
    return check_space(run, plan, retention, size + _optimizer_bytes(settings, model))


def _optimizer_bytes(settings: TrainConfig, model: nn.Module) -> int:
    try:
        return sum(state_bytes(optimizer_factory(settings), model.parameters()))
    except Exception:  # noqa: BLE001 - it may want other gradients than it is tried with, and yet train
        return 0
