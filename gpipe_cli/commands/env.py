"""gpipe env: print the machine and the versions, ready to paste into an issue."""

from __future__ import annotations

import json
import sys

from gpipe_cli.activity import activity
from gpipe_cli.config.words import Request
from gpipe_cli.errors import ConfigError
from gpipe_cli.report.environment import environment
from gpipe_cli.report.formatting import one_line


def run(request: Request) -> None:
    if request.words:
        raise ConfigError(f"'{request.words[0]}': gpipe env takes no arguments")
    activity.now("importing torch")
    facts = environment()
    if request.json:
        sys.stdout.write(f"{json.dumps(facts)}\n")
        return
    for name, value in facts.items():
        text = ", ".join(value) if isinstance(value, list) else value
        sys.stdout.write(f"- {name}: {one_line(str(text))}\n")
