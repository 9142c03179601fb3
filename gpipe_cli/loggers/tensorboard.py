"""logger=tensorboard: event files in the run directory; `tensorboard --logdir runs` shows all runs together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from gpipe_cli.loggers.protocol import LoggedRun, Logger, import_package, make_folder
from gpipe_cli.values import flatten

_FOLDER = "tensorboard"


def build() -> Logger:
    import_package("tensorboard", "tensorboard")
    return TensorBoard(import_package("torch.utils.tensorboard", "tensorboard"))


@final
class TensorBoard:
    def __init__(self, package: Any) -> None:
        self._package = package
        self._writer: Any = None

    def open(self, run: LoggedRun) -> None:
        """Hide what an earlier launch wrote for later steps, which this launch repeats."""
        self._writer = self._package.SummaryWriter(str(make_folder(run, _FOLDER)), purge_step=run.step + 1)
        lines = "\n".join(f"    {key}: {value}" for key, value in flatten(run.config))
        self._writer.add_text("config", lines, global_step=run.step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
