"""An engine for tests of all that is around a rank: every rank trains the whole model, and they agree each step."""

from __future__ import annotations

import torch
from torch import distributed, nn

from gpipe_cli.engines import single
from gpipe_cli.engines.protocol import Batch, Engine, Objective, StepFacts
from gpipe_cli.engines.state import EngineState


class WholeModel:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def module(self) -> nn.Module:
        return self._engine.module

    def train_step(self, batch: Batch, key: int, lr: float) -> StepFacts:
        distributed.barrier()
        return self._engine.train_step(batch, key, lr)

    def eval_step(self, batch: Batch) -> StepFacts:
        distributed.barrier()
        return self._engine.eval_step(batch)

    def state(self) -> EngineState:
        distributed.barrier()
        return self._engine.state() if distributed.get_rank() == 0 else EngineState({})

    def load_state(self, state: EngineState) -> None:
        self._engine.load_state(state)

    def close(self) -> None:
        self._engine.close()


def build(
    module: nn.Sequential,
    objective: Objective,
    *,
    balance: list[int],
    devices: list[torch.device],
    chunks: int,
    eval_chunks: int,
    schedule: str,
    deferred_batch_norm: bool,
    checkpoint: str,
    step_timeout: float | None,
    log_layers: bool,
    data_parallel: int,
    max_restarts: int = 0,
) -> Engine:
    return WholeModel(
        single.build(
            module,
            objective,
            device=devices[0],
            chunks=chunks,
            eval_chunks=eval_chunks,
            deferred_batch_norm=deferred_batch_norm,
        )
    )
