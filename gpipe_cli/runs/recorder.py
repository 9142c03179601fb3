"""Record a run while it trains: metrics.jsonl, train.log, progress on stderr and an experiment logger.

Rank 0, or the only process, has a `RunRecorder`; the other ranks of a run have a `RankRecorder`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from omegaconf import OmegaConf

from gpipe_cli.config.instantiate import instantiate
from gpipe_cli.config.job import Job
from gpipe_cli.config.schema import LogConfig, TrainConfig
from gpipe_cli.errors import GpipeError, ResourceError, Stopped
from gpipe_cli.loggers.protocol import LoggedRun, Logger
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import print_status, redirect_streams
from gpipe_cli.report.progress import (
    ProgressDisplay,
    RunSize,
    ShownEvaluation,
    ShownStep,
    format_clock,
    progress_display,
)
from gpipe_cli.safe_files import redacted, writing
from gpipe_cli.training.loop import (
    EvalProgress,
    EvalResult,
    Position,
    StepResult,
    TrainEvent,
    TrainFact,
    TrainSpec,
)
from gpipe_cli.training.metrics import LineFile, MetricsFile
from gpipe_cli.values import format_bytes

RANK_LOGS = "logs"
STEP_COLUMNS = ("step", "epoch", "split", "seconds")
"""Columns of metrics.jsonl that say where training stands; an experiment logger gets the others as values."""
MEASURED_SECONDS, LONG_EVALUATION, MUCH_LONGER = 1.0, 10.0, 2.0
"""Seconds of an evaluation that its forecast rests on; from how many on, and from how many times those of the training
before it, it is worth a line."""
GPIPE, RUN = logging.getLogger("gpipe_cli"), logging.getLogger("gpipe_cli.run")
PIPELINE, LAYERS = logging.getLogger("gpipe_cli.pipeline"), logging.getLogger("gpipe_cli.layers")
"""The loggers of single partitions and of single layers, which know nothing of steps."""


@final
@dataclass(frozen=True)
class RunRecorder:
    metrics: MetricsFile
    logger: GuardedLogger
    log: RunLog
    progress: ProgressDisplay
    size: RunSize
    start: Position
    disk: DiskWarnings

    @staticmethod
    @contextmanager
    def open(
        directory: Path,
        spec: TrainSpec,
        settings: LogConfig,
        start: Position = Position(),  # noqa: B008 - immutable
        *,
        logger: GuardedLogger,
        partitions: Sequence[Mapping[str, Any]] = (),
    ) -> Iterator[RunRecorder]:
        """Open the files of a run directory; the progress panel shows one row for each of `partitions`."""
        disk = DiskWarnings()
        size = RunSize(spec.steps, spec.epochs, spec.eval_batches if spec.evaluations else 0, partitions)
        try:
            with (
                closing(LineFile(directory / "train.log")) as log_file,
                run_log(log_file, settings, start.step) as log,
                MetricsFile(directory / "metrics.jsonl") as metrics,
                progress_display(size) as progress,
                log_to_console(progress.print_log, enabled=settings.console),
            ):
                disk.files = [log_file, metrics.file]
                yield RunRecorder(metrics, logger, log, progress, size, start, disk)
        finally:
            # After the files are closed: closing them is the last attempt to write the lines that wait.
            disk.warn_of_lost_lines()

    def print_status(self, line: str) -> None:
        """Write a line to stderr and to train.log."""
        self.progress.print_status(line)
        self.log.write("%s", line)

    def sync(self) -> None:
        # Rows go to disk before the snapshot of their step: a resumed run cuts the file back to its snapshot,
        # and could not restore rows that the snapshot counts but the disk never received.
        self.metrics.sync()

    def record(self, events: Iterable[TrainEvent], stop_requested: Callable[[], bool]) -> Position:
        """Drive the training loop, record each fact, and return how far it has come."""
        self.progress.watch_stop(stop_requested)
        position = self.start
        throughput, forecast = (
            Throughput(self.start.seconds),
            EvaluationForecast(self.size, self.start.seconds),
        )
        for fact in events:
            self.log.label(fact.step, evaluates=isinstance(fact, EvalProgress))
            if isinstance(fact, EvalProgress):
                self.progress.evaluating(fact.batches)
                if (line := forecast.line(fact)) is not None:
                    self.print_status(line)
                continue
            position = position.after(fact)
            if isinstance(fact, EvalResult):
                throughput.exclude(fact.took)
                forecast.since = fact.seconds
                self._evaluated(fact)
            else:
                self._trained(fact, throughput.after(fact))
                if fact.measured:
                    throughput.restart()
            self.disk.warn_once(self.print_status)
        return position

    def _trained(self, fact: StepResult, samples_per_second: float) -> None:
        transfers = ""
        if fact.transfers is not None:
            moved, waited = format_bytes(fact.transfers.moved_bytes), 1000 * fact.transfers.waited_seconds
            transfers = f"moved {moved}, waited {waited:.0f} ms"
        self.progress.step(
            ShownStep(
                fact.step,
                fact.epoch,
                fact.loss,
                fact.lr,
                samples_per_second,
                fact.seconds,
                fact.grad_norm,
                transfers,
            )
        )
        if fact.utilization is not None:
            self.progress.utilization(fact.utilization.busy, fact.utilization.bubble, fact.utilization.memory)
        if fact.skipped:
            self.print_status(
                f"step {fact.step}: fp16 gradients overflowed; skipped the update and lowered the loss scale"
            )
        if fact.lost_updates is not None:
            self.print_status(
                f"step {fact.step}: {fact.lost_updates:.0%} of the updates were too small for weights in half "
                "precision, rounded to nearest, and lost; optimizer.rounding=stochastic keeps them on average"
            )
        if fact.measured:
            extra: dict[str, Any] = {
                "loss_mean": fact.window.mean,
                "loss_min": fact.window.low,
                "loss_max": fact.window.high,
            }
            extra |= {} if fact.grad_norm is None else {"grad_norm": fact.grad_norm}
            extra |= {} if fact.transfers is None else asdict(fact.transfers)
            self._write({**_row(fact, "train", samples_per_second), **extra})
            self.log.write(
                "step %d | train loss %.6g | lr %.3g | %.1f samples/s%s",
                fact.step,
                fact.window.mean,
                fact.lr,
                samples_per_second,
                transfers and f" | {transfers}",
            )

    def _evaluated(self, fact: EvalResult) -> None:
        self._write(_row(fact, "eval", fact.samples / fact.took))
        shown = ShownEvaluation(fact.step, fact.epoch, fact.loss, fact.means, fact.seconds)
        self.progress.evaluated(shown)
        self.log.write("%s", shown.line(self.size))

    def _write(self, row: Mapping[str, Any]) -> None:
        self.metrics.write(row)
        self.logger.write(row)


@final
@dataclass(frozen=True)
class RankRecorder:
    """The recorder of a rank other than 0: it writes logs/rank-N.log and nothing else."""

    log: RunLog
    start: Position

    @staticmethod
    @contextmanager
    def open(directory: Path, rank: int, settings: LogConfig, start: Position) -> Iterator[RankRecorder]:
        path = directory / RANK_LOGS / f"rank-{rank}.log"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            # Native libraries write to descriptor 2 directly, and belong into this log too.
            redirect_streams(path, directory)
        with (
            closing(LineFile(path, directory)) as file,
            run_log(file, settings, start.step) as log,
        ):
            yield RankRecorder(log, start)

    def print_status(self, line: str) -> None:
        self.log.write("%s", line)

    def sync(self) -> None:
        """Do nothing: this rank writes no file that a snapshot depends on."""

    def record(self, events: Iterable[TrainEvent], stop_requested: Callable[[], bool]) -> Position:
        position = self.start
        for fact in events:
            self.log.label(fact.step, evaluates=isinstance(fact, EvalProgress))
            if isinstance(fact, EvalProgress):
                continue
            position = position.after(fact)
            if isinstance(fact, EvalResult):
                self.log.write("step %d | eval loss %.6g", fact.step, fact.loss)
            elif fact.measured:
                self.log.write("step %d | train loss %.6g | lr %.3g", fact.step, fact.window.mean, fact.lr)
        return position


Recorder = RunRecorder | RankRecorder


@final
class GuardedLogger:
    """An experiment logger (TensorBoard, W&B, ...) that may fail: training then continues without it."""

    def __init__(self, settings: TrainConfig) -> None:
        self._logger: Logger = instantiate(settings.logger, "logger", settings.allow)
        self._failed = False

    @contextmanager
    def opened(self, directory: Path, start: Position, job: Job) -> Iterator[None]:
        config: Any = OmegaConf.to_container(job.tree)
        run = LoggedRun(directory, f"{job.model} {directory.name}", config, start.step)
        try:
            self._logger.open(run)
        except GpipeError:
            raise
        except Exception as error:  # nothing is lost yet, so the user should hear of it now
            raise ResourceError(
                f"logger: cannot start: {describe(error)}; set logger=none to train without it"
            ) from error
        try:
            yield
        finally:
            self._guard(self._logger.close)  # a logger that failed may still hold files and threads

    def write(self, row: Mapping[str, Any]) -> None:
        if not self._failed:
            values = {
                f"{row['split']}/{name}": value for name, value in row.items() if name not in STEP_COLUMNS
            }
            self._guard(lambda: self._logger.write(row["step"], values))

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a service may raise anything, and must not end the training
            if not self._failed:
                print_status(f"warning: the logger failed; training continues without it: {describe(error)}")
            self._failed = True


@final
class DiskWarnings:
    """Warns once when train.log or metrics.jsonl cannot be written, and at the end of the lines that were lost."""

    def __init__(self) -> None:
        self.files: list[LineFile] = []
        self._warned = False

    def warn_once(self, print_status: Callable[[str], None]) -> None:
        failing = [file for file in self.files if file.trouble is not None]
        if failing and not self._warned:
            self._warned = True
            names = " and ".join(str(file.path) for file in failing)
            print_status(
                f"warning: {names}: {failing[0].trouble}; training continues, and gpipe writes the missing lines "
                "when the disk accepts them"
            )

    def warn_of_lost_lines(self) -> None:
        for file in self.files:
            if file.lost:
                print_status(f"warning: {file.path}: {file.lost} lines could not be written and are lost")


@final
class Throughput:
    """Training samples per second since the last row, without the time spent on evaluations."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._samples = 0
        self._since = self._now = seconds

    def after(self, fact: StepResult) -> float:
        self._samples += fact.samples
        self._now = fact.seconds
        return self._samples / (self._now - self._since)

    def exclude(self, seconds: float) -> None:
        self._since += seconds

    def restart(self) -> None:
        self._samples, self._since = 0, self._now


@final
class EvaluationForecast:
    """Says once, and early, that an evaluation takes much longer than the training before it."""

    def __init__(self, size: RunSize, seconds: float) -> None:
        self.since = seconds
        """When the training before the evaluation began."""
        self._batches, self._began = size.eval_batches, seconds

    def line(self, done: EvalProgress) -> str | None:
        if done.batches == 0:
            self._began = done.seconds
        trained, elapsed = self._began - self.since, done.seconds - self._began
        if self._batches is None or done.batches == 0 or elapsed < MEASURED_SECONDS:
            return None
        expected = elapsed * self._batches / done.batches
        if expected < max(LONG_EVALUATION, MUCH_LONGER * trained):
            return None
        fewer, self._batches = max(1, int(trained * self._batches / expected)), None
        return (
            f"this evaluation takes about {format_clock(expected)}, and the training before it took "
            f"{format_clock(trained)}; limit it with eval.batches={fewer}, eval.every=<steps> or eval=none"
        )


def _row(fact: TrainFact, split: str, samples_per_second: float) -> dict[str, Any]:
    return {
        "step": fact.step,
        "epoch": fact.epoch,
        "split": split,
        "loss": fact.loss,
        **fact.means,
        "lr": fact.lr,
        "samples_per_second": samples_per_second,
        "seconds": fact.seconds,
    }


@final
class RunLog(logging.Filter):
    """Writes lines to train.log, and adds to those of the pipeline which step it is, and whether it evaluates."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.label(step, evaluates=False)

    def label(self, step: int, *, evaluates: bool) -> None:
        """step: the number of steps done; a pipeline that does not evaluate now runs the next one."""
        self._label = f"step {step} | eval | " if evaluates else f"step {step + 1} | train | "

    def filter(self, record: logging.LogRecord) -> bool:
        record.label = self._label
        return True

    def write(self, line: str, *arguments: object) -> None:
        RUN.info(line, *arguments)


@final
class RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


@contextmanager
def run_log(file: LineFile, settings: LogConfig, step: int) -> Iterator[RunLog]:
    """Send gpipe's log lines to the file, and the traceback of the error that ends the run, if any.

    step: the number of steps done. The pipeline logs at INFO for each partition and at DEBUG for each layer.
    """
    handler = logging.StreamHandler(file)
    handler.setFormatter(
        RedactingFormatter("%(asctime)s %(levelname)s %(label)s%(message)s", defaults={"label": ""})
    )
    log = RunLog(step)
    before = (GPIPE.level, GPIPE.propagate, PIPELINE.level)
    GPIPE.addHandler(handler)
    GPIPE.setLevel(logging.DEBUG)
    GPIPE.propagate = False  # a handler on the root logger would print over the progress panel
    PIPELINE.setLevel(logging.INFO if settings.partitions else logging.WARNING)
    for logger in (PIPELINE, LAYERS):
        logger.addFilter(log)
    try:
        yield log
    except Stopped as stop:  # on request: there is nothing to search for
        GPIPE.info("%s", stop)
        raise
    except BaseException:
        GPIPE.exception("the run ends here")
        raise
    finally:
        # Loggers belong to the process, and the next job of a sweep opens its own train.log.
        GPIPE.removeHandler(handler)
        handler.close()
        for logger in (PIPELINE, LAYERS):
            logger.removeFilter(log)
        GPIPE.setLevel(before[0])
        GPIPE.propagate = before[1]
        PIPELINE.setLevel(before[2])


@final
class _ConsoleHandler(logging.Handler):
    def __init__(self, print_line: Callable[[str], None]) -> None:
        super().__init__()
        self._print_line = print_line

    def emit(self, record: logging.LogRecord) -> None:
        self._print_line(self.format(record))


@contextmanager
def log_to_console(print_line: Callable[[str], None], *, enabled: bool) -> Iterator[None]:
    """Inside, print the lines of partitions and layers as well."""
    if not enabled:
        yield
        return
    handler = _ConsoleHandler(print_line)
    handler.setFormatter(RedactingFormatter("%(label)s%(message)s"))
    for logger in (PIPELINE, LAYERS):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in (PIPELINE, LAYERS):
            logger.removeHandler(handler)
        handler.close()
