"""The job of a command: its settings, and everything else that it gets."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.schema import CommandConfig, ModelConfig
from gpipe_cli.config.words import override_group
from gpipe_cli.launch.rank import is_main_process
from gpipe_cli.launch.rank_files import RankFiles
from gpipe_cli.values import text_word

Summary = Mapping[str, Any]
SAME_IN_RANKS = ("overrides", "line", "model", "in_sweep", "json", "began")
"""Fields of a job that are the same in the ranks that its launcher starts."""


@final
@dataclass(frozen=True)
class Rank:
    """One of the processes that a launcher started for a job."""

    files: RankFiles
    balance: list[int]
    """Layers per partition, chosen once by the launcher."""
    order: str = ""
    """The order of schedule=auto or schedule=file, chosen by the launcher too; empty with another schedule."""


@dataclass(frozen=True)
class Job:
    command: str
    overrides: tuple[str, ...]
    """What the command line and its file give, with references unresolved, so they may be saved."""
    line: str
    """The command line that repeats it."""
    tree: DictConfig
    """The composed configuration, to be saved: references are unresolved, so that it contains no secret."""
    model: str
    """The name of the model's option, or of its target, for names of directories and logged runs."""
    settings: CommandConfig
    """The typed configuration, with references resolved; a run that is resumed has settings of its own."""
    notes: tuple[str, ...] = ()
    """Lines about the configuration that the user should read."""
    in_sweep: bool = False
    """Whether it is one of several jobs, whose results are printed together."""
    json: bool = False
    dry_run: bool = False
    debug: bool = False
    began: float = field(default_factory=time.monotonic)
    """When the command started, by the monotonic clock, which all processes of a machine share."""
    rank: Rank | None = None
    """Set if a launcher started this process as one of several."""

    def with_values(self, *, replaces: bool = False, **values: Any) -> Job:
        """A copy of the job with other values of some top-level keys, and with the overrides that were given.

        replaces: the keys below them that have no other value are dropped, as when another component is chosen.
        """
        kept = (
            {key: value for key, value in self.tree.items() if key not in values} if replaces else self.tree
        )
        tree = OmegaConf.merge(kept, values)
        assert isinstance(tree, DictConfig)
        return replace(self, tree=tree, settings=replace(self.settings, **values))

    @property
    def shows_result(self) -> bool:
        """Whether this process prints the result: a sweep prints all at its end, and a launcher that of its ranks."""
        return is_main_process() and not (self.json or self.in_sweep or self.rank is not None)

    def train_command(self, without: Collection[str]) -> str:
        """The command that trains with the same overrides, except for some keys and the keys below them."""
        words = shlex.split(self.line)[2:]
        remaining = [word for word in words if override_group(word) not in without]
        return shlex.join(["gpipe", "train", *remaining])


def resume_command(run: Path, settings: ModelConfig) -> str:
    """The command to resume a run: its settings are saved in it, except for `allow`."""
    return shlex.join(["gpipe", "train", text_word("resume", run), *allow_override(settings)])


def allow_override(settings: ModelConfig) -> list[str]:
    return [f"allow=[{','.join(settings.allow)}]"] if settings.allow else []
