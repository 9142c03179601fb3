"""gpipe export: write the weights of a run or snapshot in a format that loads without gpipe."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from gpipe_cli.arguments import Invocation, parse_keys
from gpipe_cli.errors import ConfigError, ResourceError, or_list
from gpipe_cli.report.output import print_status
from gpipe_cli.report.tables import print_facts
from gpipe_cli.run.base_weights import base_of_snapshot
from gpipe_cli.run.export import hf_directory
from gpipe_cli.run.inference_spec import METADATA_KEY, SPEC_FILE, spec_of_run
from gpipe_cli.run.saved_run import AT, choose_snapshot
from gpipe_cli.training.snapshot.contents import decode_tensors
from gpipe_cli.training.snapshot.durable import write_file
from gpipe_cli.training.snapshot.file_names import MODEL
from gpipe_cli.training.snapshot.manifest import VerifiedSnapshot, first_valid_snapshot, run_directory_of
from gpipe_cli.training.snapshot.tensors import encode

KEYS = {"run": "directory", "at": "best|last", "snapshot": "directory", "out": "file", "format": "format"}


def run(invocation: Invocation) -> None:
    formats = {"safetensors": _write_file, "hf": hf_directory.write, "peft": hf_directory.write_adapter}
    keys = _parse(invocation.words)
    name = keys.get("format", "safetensors")
    if name not in formats:
        raise ConfigError(f"format={name}: must be one of: {', '.join(formats)}")
    if name != "safetensors" and "out" not in keys:
        raise ConfigError(f"format={name}: writes a directory; give out=<directory>")
    out = Path(keys.get("out", MODEL))
    if os.path.lexists(out):
        raise ConfigError(f"out={out}: exists; give another name, or remove it")
    key = "snapshot" if "snapshot" in keys else "run"
    search = partial(first_valid_snapshot, wanted=(MODEL,) if name == "safetensors" else ())
    chosen = choose_snapshot(key, keys[key], keys.get("at"), search)
    snapshot = chosen.verified
    facts = {"out": str(out), **formats[name](snapshot, out), "snapshot": str(snapshot.path)}
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


def _write_file(snapshot: VerifiedSnapshot, out: Path) -> dict[str, Any]:
    """format=safetensors: the weights, with what predictions need as metadata and as JSON beside the file."""
    if base_of_snapshot(snapshot) is not None:
        raise ConfigError(
            f"format=safetensors: {snapshot.path} has only the adapter of a model; give format=peft out=<directory>"
        )
    weights, run = decode_tensors(snapshot, MODEL), run_directory_of(snapshot.path)
    spec = spec_of_run(run)
    beside = out.with_suffix(".json")
    if spec is None:
        print_status(
            f"{run}: has no {SPEC_FILE}, because an older gpipe trained it: the file has no class names and no "
            "normalization"
        )
    elif os.path.lexists(beside):
        raise ConfigError(
            f"out={out}: {beside} exists, where its description belongs; give another name, or remove it"
        )
    # What torch's own writer says of the tensors; transformers asks for it.
    metadata = {} if spec is None else {"format": "pt", METADATA_KEY: spec.to_text()}
    content = list(encode(weights, metadata=metadata))
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, content, replace=False)
        if spec is not None:
            write_file(beside, [f"{spec.to_text()}\n".encode()], replace=False)
    except OSError as error:
        raise ResourceError(f"out={out}: cannot be written: {error}") from error
    facts = {"bytes": out.stat().st_size, "sha256": digest.hexdigest()}
    return facts if spec is None else {**facts, "description": str(beside)}
