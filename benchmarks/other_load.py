"""What other processes and virtual machines use of this machine while a benchmark runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rich.console import Console

QUIET = 0.2
"""Cores that others use, above which something else must be running."""
SECONDS = 2.0
STATISTICS = Path("/proc/stat")


def seconds_of_others() -> float:
    """CPU seconds that others have used so far; 0 where the system does not report them."""
    if not STATISTICS.exists():
        return 0.0
    user, nice, system, _idle, _waiting, interrupts, softirqs, stolen = map(
        int, STATISTICS.read_text().split()[1:9]
    )
    ticks = user + nice + system + interrupts + softirqs + stolen
    own = os.times()
    return ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system


def warn_if_busy(console: Console) -> None:
    """Watch the machine for two seconds; its load average would still show what ran before."""
    before = seconds_of_others()
    time.sleep(SECONDS)
    if (cores := (seconds_of_others() - before) / SECONDS) > QUIET:
        console.print(f"Other processes use {cores:.1f} cores: do not quote these figures.")
