"""The planner is loaded only by what plans."""

from __future__ import annotations

import subprocess
import sys


def test_a_training_run_loads_no_planner() -> None:
    program = (
        "import sys, gpipe_cli.commands.train\n"
        "print([name for name in sys.modules if name.startswith('gpipe_cli.plan')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
