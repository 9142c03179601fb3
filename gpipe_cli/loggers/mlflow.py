"""logger=mlflow: an MLflow server or folder. A run that goes on is the same run there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from gpipe_cli.loggers.protocol import Logged, Logger, flat, known_id, remember_id, required

LONGEST_VALUE = 500
"""Characters that MLflow takes for the value of a parameter."""


def build(experiment: str, tracking_uri: str | None = None) -> Logger:
    return MLflow(required("mlflow", "mlflow"), experiment, tracking_uri)


@final
class MLflow:
    def __init__(self, package: Any, experiment: str, tracking_uri: str | None) -> None:
        self._package, self._experiment, self._tracking_uri = package, experiment, tracking_uri
        self._is_open = False

    def open(self, run: Logged) -> None:
        if self._tracking_uri is not None:
            self._package.set_tracking_uri(self._tracking_uri)
        self._package.set_experiment(self._experiment)
        known = known_id(run, "mlflow")
        begun = self._package.start_run(run_id=known, run_name=None if known else run.name)
        self._is_open = True
        if known is None:  # parameters of a run cannot be changed there
            remember_id(run, "mlflow", begun.info.run_id)
            parameters = {key: str(value)[:LONGEST_VALUE] for key, value in flat(run.config).items()}
            self._package.log_params(parameters)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._package.log_metrics(dict(values), step=step)

    def close(self) -> None:
        if self._is_open:
            self._package.end_run()
