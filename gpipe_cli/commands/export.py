"""gpipe export: write the weights of a run or snapshot in a format that loads without gpipe."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

from gpipe_cli.arguments import Invocation, parse_keys
from gpipe_cli.errors import ConfigError, or_list
from gpipe_cli.report.output import print_status
from gpipe_cli.report.tables import print_facts
from gpipe_cli.run.export import hf_directory, peft_directory, safetensors_file
from gpipe_cli.run.snapshot_choice import AT, choose_snapshot
from gpipe_cli.training.snapshot.file_names import MODEL
from gpipe_cli.training.snapshot.manifest import first_valid_snapshot

KEYS = {"run": "directory", "at": "best|last", "snapshot": "directory", "out": "file", "format": "format"}
FORMATS = {
    "safetensors": safetensors_file.write,
    "hf": hf_directory.write,
    "peft": peft_directory.write,
}


def run(invocation: Invocation) -> None:
    keys = _parse(invocation.words)
    name = keys.get("format", "safetensors")
    if name not in FORMATS:
        raise ConfigError(f"format={name}: must be one of: {', '.join(FORMATS)}")
    if name != "safetensors" and "out" not in keys:
        raise ConfigError(f"format={name}: writes a directory; give out=<directory>")
    out = Path(keys.get("out", MODEL))
    if os.path.lexists(out):
        raise ConfigError(f"out={out}: exists; give another name, or remove it")
    key = "snapshot" if "snapshot" in keys else "run"
    search = partial(first_valid_snapshot, wanted=(MODEL,) if name == "safetensors" else ())
    chosen = choose_snapshot(key, keys[key], keys.get("at"), search)
    snapshot = chosen.verified
    facts = {"out": str(out), **FORMATS[name](snapshot, out), "snapshot": str(snapshot.path)}
    print_status(chosen.reason)
    if invocation.json:
        sys.stdout.write(f"{json.dumps(facts)}\n")
    else:
        print_facts("", facts)


def _parse(words: tuple[str, ...]) -> dict[str, str]:
    given = parse_keys(words, KEYS)
    if ("run" in given) == ("snapshot" in given):
        raise ConfigError("give either run=<directory> or snapshot=<directory>")
    if "at" in given and "snapshot" in given:
        raise ConfigError(f"at={given['at']}: chooses among the snapshots of run=...; leave it out")
    if given.get("at", AT[0]) not in AT:
        raise ConfigError(f"at={given['at']}: {or_list(given['at'], AT)}")
    return given
