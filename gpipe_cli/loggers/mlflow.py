"""logger=mlflow: an MLflow server or folder. A resumed run stays the same MLflow run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from gpipe_cli.loggers.protocol import LoggedRun, Logger, import_package, load_id, save_id
from gpipe_cli.values import flatten

_MAX_VALUE_LENGTH = 500
"""MLflow's limit on the characters of a parameter's value."""


def build(experiment: str, tracking_uri: str | None = None) -> Logger:
    return MLflow(import_package("mlflow", "mlflow"), experiment, tracking_uri)


@final
class MLflow:
    def __init__(self, package: Any, experiment: str, tracking_uri: str | None) -> None:
        self._package, self._experiment, self._tracking_uri = package, experiment, tracking_uri
        self._is_open = False

    def open(self, run: LoggedRun) -> None:
        if self._tracking_uri is not None:
            self._package.set_tracking_uri(self._tracking_uri)
        self._package.set_experiment(self._experiment)
        run_id = load_id(run, "mlflow")
        started = self._package.start_run(run_id=run_id, run_name=None if run_id else run.name)
        self._is_open = True
        if run_id is None:  # MLflow does not let a resumed run change its parameters
            save_id(run, "mlflow", started.info.run_id)
            parameters = {key: str(value)[:_MAX_VALUE_LENGTH] for key, value in flatten(run.config)}
            self._package.log_params(parameters)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._package.log_metrics(dict(values), step=step)

    def close(self) -> None:
        if self._is_open:
            self._package.end_run()
