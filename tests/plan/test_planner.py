"""What the planner says of its work, and that only what plans loads it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from gpipe_cli.plan.planner import Coverage, rounded_up


def test_a_training_run_loads_no_planner() -> None:
    program = (
        "import sys, gpipe_cli.commands.train\n"
        "print([name for name in sys.modules if name.startswith('gpipe_cli.plan')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_what_there_was_no_time_for_is_counted_and_the_time_for_all_named() -> None:
    coverage = Coverage(sizes=5, measured=1, candidates=191, searched=12, budget=300.0)
    assert not coverage.is_complete
    assert str(coverage) == "measured 1 of 5 sizes, searched 12 of 191 candidates; plan.budget=300 does all"
    # Estimates measure nothing.
    estimated = replace(coverage, measured=5)
    assert str(estimated) == "searched 12 of 191 candidates; plan.budget=300 does all"
    assert replace(estimated, searched=191).is_complete


@pytest.mark.parametrize(("seconds", "budget"), [(0.4, 0.5), (7.2, 7.5), (61, 65), (247, 250), (1001, 1500)])
def test_the_budget_that_is_suggested_is_round_and_suffices(seconds: float, budget: float) -> None:
    assert rounded_up(seconds) == budget
