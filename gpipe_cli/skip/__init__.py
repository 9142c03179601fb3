"""Skip connections that go straight from the partition that stashes a tensor to the one that pops it.

    @skippable(stash=["skip"])
    class Begin(nn.Module):
        def forward(self, input):
            yield stash("skip", input)
            return self.layer(input)

    @skippable(pop=["skip"])
    class End(nn.Module):
        def forward(self, input):
            skip = yield pop("skip")
            return self.layer(input) + skip

Such layers also work in a plain `nn.Sequential`.
"""

from __future__ import annotations

from gpipe_cli.skip.skippable import (
    SkipLayout,
    Skippable,
    SkipRoute,
    pop,
    skip_layout,
    skippable,
    stash,
    verify_skippables,
)
from gpipe_cli.skip.tracker import Namespace, SkipName, SkipTracker, use_skip_tracker

__all__ = [
    "Namespace",
    "SkipLayout",
    "SkipName",
    "SkipRoute",
    "SkipTracker",
    "Skippable",
    "pop",
    "skip_layout",
    "skippable",
    "stash",
    "use_skip_tracker",
    "verify_skippables",
]
