"""What becomes of the facts of a run: rows of metrics.jsonl, lines of train.log, progress on stderr."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from gpipe_cli.byte_size import byte_text
from gpipe_cli.config.schema import LogConfig
from gpipe_cli.offload.transfers import Transfers
from gpipe_cli.report.numbers import readable
from gpipe_cli.report.output import say
from gpipe_cli.report.progress import Watcher, watcher
from gpipe_cli.run.logs import run_log
from gpipe_cli.run.relay import Relay
from gpipe_cli.training.line_file import LineFile
from gpipe_cli.training.loop import Evaluated, Fact, Plan, Position, Trained
from gpipe_cli.training.metrics import MetricsFile


@final
@dataclass(frozen=True)
class Journal:
    metrics: MetricsFile
    relay: Relay
    log: logging.Logger
    watching: Watcher
    every: int
    start: Position
    disk: Disk

    @staticmethod
    @contextmanager
    def open(
        directory: Path,
        plan: Plan,
        settings: LogConfig,
        start: Position = Position(),  # noqa: B008 - immutable
        *,
        relay: Relay,
        partitions: Sequence[Mapping[str, Any]] = (),
    ) -> Iterator[Journal]:
        """`partitions`: a row for each, for who sees them at work."""
        disk = Disk()
        try:
            with (
                closing(LineFile(directory / "train.log")) as log_file,
                run_log(log_file, partitions=settings.partitions, layers=settings.layers) as log,
                MetricsFile(directory / "metrics.jsonl") as metrics,
                watcher(plan.steps, plan.epochs, settings.every, partitions) as watching,
            ):
                disk.files = [log_file, metrics.file]
                yield Journal(metrics, relay, log, watching, settings.every, start, disk)
        finally:
            disk.tell_lost(say)

    def say(self, line: str) -> None:
        """To the person and to the log."""
        self.watching.say(line)
        self.log.info("%s", line)

    def sync(self) -> None:
        """What is to be on disk before a snapshot is."""
        self.metrics.sync()

    def follow(self, facts: Iterable[Fact]) -> Evaluated:
        """Write every fact where it belongs; the last evaluation is returned."""
        last = self.start.evaluation
        pace = Pace(self.start.seconds)
        for fact in facts:
            if isinstance(fact, Evaluated):
                last = fact
                pace.pause(fact.took)
                self._evaluated(fact)
            else:
                self._trained(fact, pace.after(fact))
                if fact.step % self.every == 0:
                    pace.restart()
            self.disk.tell_trouble(self.say)
        assert last is not None, "training ends with an evaluation"
        return last

    def _trained(self, fact: Trained, speed: float) -> None:
        transfers = "" if fact.transfers is None else _told(fact.transfers)
        self.watching.step(fact.step, fact.epoch, fact.loss, fact.lr, speed, transfers)
        if fact.utilisation is not None:
            self.watching.load(fact.utilisation.busy, fact.utilisation.bubble, fact.utilisation.memory)
        if fact.skipped:
            self.say(f"step {fact.step}: fp16 gradients overflowed, update left out, loss scale lowered")
        if fact.step % self.every == 0:
            extra: dict[str, Any] = {} if fact.grad_norm is None else {"grad_norm": fact.grad_norm}
            extra |= {} if fact.transfers is None else asdict(fact.transfers)
            self._write({**_row(fact, "train", speed), **extra})
            self.log.info(
                "step %d | loss %.6g | lr %.3g | %.1f samples/s%s",
                fact.step,
                fact.loss,
                fact.lr,
                speed,
                transfers and f" | {transfers}",
            )

    def _write(self, row: Mapping[str, Any]) -> None:
        self.metrics.write(row)
        self.relay.write(row)

    def _evaluated(self, fact: Evaluated) -> None:
        self._write(_row(fact, "eval", fact.samples / fact.took))
        found = "".join(f" | {name} {readable(name, value)}" for name, value in fact.means.items())
        self.say(f"epoch {fact.epoch + 1} | step {fact.step} | eval loss {fact.loss:.4f}{found}")


@final
class Disk:
    """The files a run can do without; says once that they cannot be written, and at the end what they lack."""

    def __init__(self) -> None:
        self.files: list[LineFile] = []
        self._told = False

    def tell_trouble(self, say: Callable[[str], None]) -> None:
        troubled = [file for file in self.files if file.trouble is not None]
        if troubled and not self._told:
            self._told = True
            names = " and ".join(str(file.path) for file in troubled)
            say(
                f"warning: {names}: {troubled[0].trouble}; training goes on, their lines wait until there is room"
            )

    def tell_lost(self, say: Callable[[str], None]) -> None:
        for file in self.files:
            if file.lost:
                say(f"warning: {file.path}: {file.lost} lines could not be written and are lost")


@final
class Pace:
    """Training samples per second since the last row, evaluations left out."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._samples = 0
        self._since = self._now = seconds

    def after(self, fact: Trained) -> float:
        self._samples += fact.samples
        self._now = fact.seconds
        return self._samples / (self._now - self._since)

    def pause(self, seconds: float) -> None:
        self._since += seconds

    def restart(self) -> None:
        self._samples, self._since = 0, self._now


def _told(transfers: Transfers) -> str:
    """What a step moved between its device and where the model is kept."""
    return f"moved {byte_text(transfers.moved_bytes)}, waited {1000 * transfers.waited_seconds:.0f} ms"


def _row(fact: Fact, split: str, samples_per_second: float) -> dict[str, Any]:
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
