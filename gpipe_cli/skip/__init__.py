"""Skip connections that jump straight from the partition that stashes to the one that pops.

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

Layers written so also work in a plain `nn.Sequential`. How a skip travels between partitions is not known
here: the pipeline lends a `SkipTracker` to the thread that runs a layer.
"""

from __future__ import annotations

from gpipe_cli.skip.command import pop, stash
from gpipe_cli.skip.layout import SkipLayout, SkipRoute, skip_layout
from gpipe_cli.skip.name import Namespace, SkipName
from gpipe_cli.skip.skippable import Skippable, skippable
from gpipe_cli.skip.tracker import SkipTracker, use_skip_tracker
from gpipe_cli.skip.verify import verify_skippables

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
