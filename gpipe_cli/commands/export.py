"""gpipe export: write the weights of a run or snapshot to one file under the original names, for use without gpipe.

A snapshot contains such a file. gpipe verifies and copies it, and does not need torch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gpipe_cli.arguments import Invocation, parse_keys
from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.report.tables import print_facts
from gpipe_cli.run.saved_run import select_snapshot
from gpipe_cli.tensor_files.header import BadTensors, read_header
from gpipe_cli.training.snapshot.durable import write_file
from gpipe_cli.training.snapshot.manifest import MODEL

KEYS = {"run": "directory", "snapshot": "directory", "out": "file"}


def run(invocation: Invocation) -> None:
    keys = _parse(invocation.words)
    out = Path(keys.get("out", MODEL))
    if os.path.lexists(out):
        raise ConfigError(f"out={out}: exists; give another name, or remove it")
    key = "snapshot" if "snapshot" in keys else "run"
    snapshot = select_snapshot(key, keys[key], (MODEL,))
    weights = snapshot.contents[MODEL]
    try:
        read_header(weights, len(weights))
    except BadTensors as error:
        raise RunError(f"{snapshot.path / MODEL}: damaged: {error}") from error
    try:
        write_file(out, [weights], replace=False)
    except OSError as error:
        raise ResourceError(f"out={out}: cannot be written: {error}") from error
    facts = {
        "out": str(out),
        "bytes": out.stat().st_size,
        "sha256": snapshot.manifest.files[MODEL].sha256,
        "snapshot": str(snapshot.path),
    }
    if invocation.json:
        sys.stdout.write(f"{json.dumps(facts)}\n")
    else:
        print_facts("", facts)


def _parse(words: tuple[str, ...]) -> dict[str, str]:
    given = parse_keys(words, KEYS)
    if ("run" in given) == ("snapshot" in given):
        raise ConfigError("give either run=<directory> or snapshot=<directory>")
    return given
