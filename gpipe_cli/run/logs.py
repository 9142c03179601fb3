"""train.log: what the loggers under `gpipe_cli` say during a run. Off the terminal, on disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from gpipe_cli.redaction import redacted
from gpipe_cli.training.line_file import LineFile

LOGGER = "gpipe_cli"
PIPELINE = "gpipe_cli.pipeline"


@final
class RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


@contextmanager
def run_log(file: LineFile, *, partitions: bool, layers: bool) -> Iterator[logging.Logger]:
    """Inside, gpipe's loggers write to the file; the pipeline's own lines only if asked for.

    What ends the run before its time is the last thing written.
    """
    logger, pipeline = logging.getLogger(LOGGER), logging.getLogger(PIPELINE)
    handler = logging.StreamHandler(file)
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(message)s"))
    before = (logger.level, logger.propagate, pipeline.level)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    pipeline.setLevel(logging.DEBUG if layers else logging.INFO if partitions else logging.WARNING)
    try:
        yield logging.getLogger(f"{LOGGER}.commands")
    except BaseException:
        logger.exception("the run ends here")
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]
        pipeline.setLevel(before[2])
