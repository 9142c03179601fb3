"""logger=wandb: Weights & Biases. A run that goes on is the same run there."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, final

from gpipe_cli.loggers.protocol import Logged, Logger, known_id, own_folder, remember_id, required


def build(project: str, mode: str | None = None) -> Logger:
    return WeightsAndBiases(required("wandb", "wandb"), project, mode)


@final
class WeightsAndBiases:
    def __init__(self, package: Any, project: str, mode: str | None) -> None:
        self._package, self._project, self._mode = package, project, mode
        self._run: Any = None

    def open(self, run: Logged) -> None:
        own_folder(run, "wandb")  # the service makes it there itself, and would follow a link
        identity = known_id(run, "wandb") or secrets.token_hex(8)
        self._run = self._package.init(
            project=self._project,
            mode=self._mode,
            name=run.name,
            id=identity,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
        )
        remember_id(run, "wandb", identity)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Its own step counts calls and cannot go back; ours is a value like any other."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
