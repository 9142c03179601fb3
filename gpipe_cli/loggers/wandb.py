"""logger=wandb: Weights & Biases. A resumed run stays the same W&B run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, final

from gpipe_cli.loggers.protocol import LoggedRun, Logger, import_package, load_id, make_folder, save_id


def build(project: str, mode: str | None = None) -> Logger:
    return WeightsAndBiases(import_package("wandb", "wandb"), project, mode)


@final
class WeightsAndBiases:
    def __init__(self, package: Any, project: str, mode: str | None) -> None:
        self._package, self._project, self._mode = package, project, mode
        self._run: Any = None

    def open(self, run: LoggedRun) -> None:
        make_folder(run, "wandb")  # created here because wandb would follow a symbolic link
        identity = load_id(run, "wandb") or secrets.token_hex(8)
        self._run = self._package.init(
            project=self._project,
            mode=self._mode,
            name=run.name,
            id=identity,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
        )
        save_id(run, "wandb", identity)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the step as a value: the step of W&B counts calls and cannot go back."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
