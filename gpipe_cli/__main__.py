"""The entry point of `gpipe` and `python -m gpipe_cli`: secures signals and streams before it imports the rest."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import NoReturn


def script() -> NoReturn:
    # Before any other import: a signal that arrives meanwhile is remembered, and no file gets a closed stream's number.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    from gpipe_cli.activity import activity
    from gpipe_cli.report.output import secure_streams
    from gpipe_cli.training.signals import ignore_signals, install_handlers

    with install_handlers().defer(patient=True):
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        secure_streams()
        if sys.argv[1:] and not sys.argv[1].startswith("-"):  # a command: completion must print nothing else
            activity.start("starting")
        # Importing creates hundreds of thousands of objects that stay, and the collector would scan all of them again
        # and again. `jobs` enables it before a command runs.
        gc.disable()
        from gpipe_cli.cli import main
        from gpipe_cli.launch.rank import is_rank
    code = main()
    sys.stdout.flush()
    ignore_signals()
    if is_rank():
        # Threads of torch.distributed still run. One that asks for the interpreter's lock while the interpreter ends
        # aborts the process, and torchrun would count a run that has finished as failed.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    script()
