"""What a command is given besides its settings: the job, and its rank where a launcher started several processes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, final

from omegaconf import DictConfig

from gpipe_cli.launch.rank_files import RankFiles

Summary = Mapping[str, Any]


@final
@dataclass(frozen=True)
class Rank:
    """One of the processes that a launcher started for a job."""

    meeting: RankFiles
    balance: list[int]
    """Layers per partition, found once by the launcher."""
    began: float
    """When the command did, by the monotonic clock, which all processes of a machine share."""


@dataclass(frozen=True)
class Job:
    """What a command is told besides its settings."""

    command: str
    overrides: tuple[str, ...]
    line: str
    """The command that repeats it."""
    tree: DictConfig
    """The composed configuration as it is saved: references unresolved, so no secret is written."""
    model: str
    """The option chosen, for names."""
    number: int | None
    """Its place in a sweep."""
    json: bool
    dry_run: bool
    rank: Rank | None = None
    """What this process is told besides, if a launcher started it as one of several."""

    @property
    def shows_result(self) -> bool:
        """Whether its result is printed as soon as it is known; a sweep prints all of them at its end."""
        return not self.json and self.number is None

    def training_without(self, keys: Collection[str]) -> str:
        """The command that trains with what was said here, but for some keys and what is below them."""
        words = shlex.split(self.line)[2:]
        kept = [word for word in words if re.split(r"[.=]", word.lstrip("+~"))[0] not in keys]
        return shlex.join(["gpipe", "train", *kept])
