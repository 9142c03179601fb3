"""What happens at each boundary of training: the fact is written down, then the state saved, then requests heeded."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

from gpipe_cli.training.loop import Fact
from gpipe_cli.training.signals import StopRequested, StopRequests
from gpipe_cli.training.snapshot.keeper import Keeper

MARGIN = 1.5  # of what was measured: the next save or step may be slower


def survive(facts: Generator[Fact, None, None], keeper: Keeper, stops: StopRequests) -> Iterator[Fact]:
    """The facts; whoever takes them has each written down before it becomes part of a snapshot.

    A request to stop ends them with a snapshot and StopRequested.
    """
    longest = 0.0
    last = time.monotonic()
    try:
        for fact in facts:
            yield fact
            keeper.after(fact)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            stops.reserve = MARGIN * (keeper.save_seconds + longest)
            if not keeper.finished and (request := stops.agreed()):
                raise request
        keeper.save_now()
    except StopRequested:
        keeper.save_now()
        raise
    finally:
        facts.close()
