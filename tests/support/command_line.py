"""What a command line answers, and the types of the fixtures that run one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Answer:
    """Exit code and output of a command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Gpipe(Protocol):
    """Runs a command line in this process: the fixtures `gpipe`, `tiny` and `huge`, and those built on them."""

    def __call__(self, *words: str) -> Answer: ...


class UserModule(Protocol):
    """Writes a module of a user, and returns its path: the fixture `user_module`."""

    def __call__(self, name: str, text: str) -> Path: ...
