"""The job of a command: everything that it gets besides its settings."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.config.words import override_group, text_word
from gpipe_cli.launch.rank_files import RankFiles, RankTask

Summary = Mapping[str, Any]


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
    line: str
    """The command line that repeats it."""
    tree: DictConfig
    """The composed configuration, to be saved: references are unresolved, so that it contains no secret."""
    model: str
    """The name of the model's option, for names of directories and logged runs."""
    in_sweep: bool
    """Whether it is one of several jobs, whose results are printed together."""
    json: bool
    dry_run: bool
    debug: bool = False
    began: float = field(default_factory=time.monotonic)
    """When the command started, by the monotonic clock, which all processes of a machine share."""
    rank: Rank | None = None
    """Set if a launcher started this process as one of several."""

    @staticmethod
    def of_rank(files: RankFiles, task: RankTask) -> Job:
        """The job of one rank, as its launcher describes it."""
        tree = OmegaConf.create(task.config)
        assert isinstance(tree, DictConfig), "the launcher wrote a mapping"
        return Job(
            task.command,
            tuple(task.overrides),
            line=task.line,
            tree=tree,
            model=task.model,
            in_sweep=task.in_sweep,
            json=task.json,
            dry_run=False,
            began=task.began,
            rank=Rank(files, task.balance, task.order),
        )

    @property
    def shows_result(self) -> bool:
        """Whether the command prints its result: a sweep prints all at its end, and a launcher that of its ranks."""
        return not self.json and not self.in_sweep and self.rank is None

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
