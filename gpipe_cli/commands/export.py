"""gpipe export: write the weights of a run or snapshot in a format that loads without gpipe."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Any

from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import ExportConfig
from gpipe_cli.errors import ConfigError, ResourceError
from gpipe_cli.inference.export import hf_directory
from gpipe_cli.inference.spec import METADATA_KEY, SPEC_FILE, spec_of_run
from gpipe_cli.report.output import print_status
from gpipe_cli.report.tables import print_facts
from gpipe_cli.runs.saved import choose_snapshot
from gpipe_cli.runs.snapshots.base_weights import base_of_snapshot
from gpipe_cli.runs.snapshots.contents import decode_tensors
from gpipe_cli.runs.snapshots.durable import write_file
from gpipe_cli.runs.snapshots.file_names import MODEL
from gpipe_cli.runs.snapshots.manifest import VerifiedSnapshot, first_valid_snapshot, run_directory_of
from gpipe_cli.runs.snapshots.tensors import encode

FORMATS = {"hf": hf_directory.write, "peft": hf_directory.write_adapter}
"""The formats that are directories."""


def run(settings: ExportConfig, job: Job) -> Summary:
    out = Path(settings.out or MODEL)
    if os.path.lexists(out):
        raise ConfigError(f"out={out}: exists; give another name, or remove it")
    key, value = ("run", settings.run) if settings.snapshot is None else ("snapshot", settings.snapshot)
    assert value is not None, "the configuration was checked"
    search = partial(first_valid_snapshot, wanted=() if settings.format in FORMATS else (MODEL,))
    chosen = choose_snapshot(key, value, settings.which or settings.at, search)
    write = FORMATS.get(settings.format, _write_file)
    facts = {"out": str(out), **write(chosen.verified, out), "snapshot": str(chosen.verified.path)}
    print_status(chosen.reason)
    if job.shows_result:
        print_facts("", facts)
    return facts


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
