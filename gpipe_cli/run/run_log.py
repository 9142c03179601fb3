"""train.log: lines about the run, and those of the pipeline with the step they belong to, on the terminal as well."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from gpipe_cli.config.schema import LogConfig
from gpipe_cli.redaction import redacted
from gpipe_cli.training.metrics import LineFile

GPIPE, RUN = logging.getLogger("gpipe_cli"), logging.getLogger("gpipe_cli.run")
PIPELINE, LAYERS = logging.getLogger("gpipe_cli.pipeline"), logging.getLogger("gpipe_cli.layers")
"""The loggers of single partitions and of single layers, which know nothing of steps."""


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
