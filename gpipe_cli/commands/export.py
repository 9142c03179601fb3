"""gpipe export: write the weights of a run or snapshot in a format that loads without gpipe."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from gpipe_cli.activity import activity
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import ExportConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.inference import export_formats
from gpipe_cli.report.output import print_status
from gpipe_cli.report.tables import print_facts
from gpipe_cli.runs.saved import choose_snapshot
from gpipe_cli.runs.snapshots.manifest import MODEL, first_valid_snapshot

DIRECTORIES = {"hf": export_formats.write_directory, "peft": export_formats.write_adapter}
"""The formats that are directories."""


def run(settings: ExportConfig, job: Job) -> Summary:
    out = Path(settings.out or MODEL)
    if os.path.lexists(out):
        raise ConfigError(f"out={out}: exists; give another name, or remove it")
    key, value = ("run", settings.run) if settings.snapshot is None else ("snapshot", settings.snapshot)
    assert value is not None, "the configuration was checked"
    activity.now("reading the snapshot")
    writes_directory = settings.merge or settings.format in DIRECTORIES
    search = partial(first_valid_snapshot, wanted=() if writes_directory else (MODEL,))
    chosen = choose_snapshot(key, value, settings.which or settings.at, search)
    write = DIRECTORIES.get(settings.format, export_formats.write_file)
    if settings.merge:
        write = export_formats.write_merged
    facts = {"out": str(out), **write(chosen.verified, out), "snapshot": str(chosen.verified.path)}
    print_status(chosen.reason)
    if job.shows_result:
        print_facts("", facts)
    return facts
