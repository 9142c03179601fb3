"""The rows of a run, passed on to a logger. What becomes of a service that fails: it is left out, training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from omegaconf import OmegaConf

from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.config.targets import instantiate
from gpipe_cli.errors import GpipeError, ResourceError
from gpipe_cli.loggers.protocol import Logged, Logger
from gpipe_cli.report.failure import describe
from gpipe_cli.report.output import say
from gpipe_cli.run.job import Job
from gpipe_cli.run.setup import Begun

__all__ = ["Relay"]

PLACE = ("step", "epoch", "split", "seconds")


@final
class Relay:
    def __init__(self, settings: TrainConfig) -> None:
        self._logger: Logger = instantiate(settings.logger, "logger", settings.allow)
        self._failed = False

    @contextmanager
    def opened(self, begun: Begun, job: Job) -> Iterator[None]:
        """Inside, rows are passed on."""
        config: Any = OmegaConf.to_container(job.tree)
        run = Logged(begun.directory, f"{job.model} {begun.directory.name}", config, begun.position.step)
        try:
            self._logger.open(run)
        except GpipeError:
            raise
        except Exception as error:  # before the first step there is no harm in giving up
            raise ResourceError(
                f"logger: cannot begin: {describe(error)}; logger=none trains without it"
            ) from error
        try:
            yield
        finally:
            self._attempt(self._logger.close)  # one that failed holds files and threads too

    def write(self, row: Mapping[str, Any]) -> None:
        if not self._failed:
            values = {f"{row['split']}/{name}": value for name, value in row.items() if name not in PLACE}
            self._attempt(lambda: self._logger.write(row["step"], values))

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a foreign service may raise anything, and is no reason to stop
            if not self._failed:
                say(f"warning: the logger failed and is left out: {describe(error)}")
            self._failed = True
