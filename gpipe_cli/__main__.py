"""The process `gpipe`, or `python -m gpipe_cli`: signals and streams are made safe before anything else is imported."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from gpipe_cli.report.output import secure_streams
from gpipe_cli.training.signals import ignore_signals, install_handlers


def script() -> NoReturn:
    # Before any other import: a signal that comes meanwhile is remembered, and no file takes a closed stream's number.
    with install_handlers().defer(patient=True):
        secure_streams()
        # Importing creates hundreds of thousands of objects that stay, and the collector would scan all of them again
        # and again. `commands.jobs` enables it before a command runs.
        gc.disable()
        from gpipe_cli.cli import main
    code = main()
    sys.stdout.flush()
    ignore_signals()
    sys.exit(code)


if __name__ == "__main__":
    script()
