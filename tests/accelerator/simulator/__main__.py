"""Run a gpipe command on simulated devices: python -m tests.accelerator.simulator cuda train model=mlp devices=2"""

from __future__ import annotations

import sys

from tests.accelerator.simulator import load

if __name__ == "__main__":
    build, *words = sys.argv[1:]
    simulator = load(build)  # type: ignore[arg-type]
    from gpipe_cli.cli import main

    code = main(words)
    counts = f"races: {len(simulator.races())}, host synchronizations: {len(simulator.host_syncs())}"
    sys.stderr.write("\n\n".join([*simulator.races(), counts]) + "\n")
    sys.exit(code)
