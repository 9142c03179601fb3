"""gpipe cp: copy a recipe, an option or the settings of a run to a new file that you can edit. Imports no torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpipe_cli.commands.ls import topic_of
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.keys import Option, chosen_options, list_options
from gpipe_cli.config.schema import SCHEMAS, CpConfig
from gpipe_cli.config.yaml_files import (
    LAUNCH_KEYS,
    OPTION,
    dump_mapping,
    is_saved,
    load_mapping,
    load_saved,
    recorded_words,
    saved_command,
)
from gpipe_cli.errors import ConfigError, ResourceError, RunError, or_list
from gpipe_cli.report.formatting import one_line
from gpipe_cli.runs.reader import has_settings

RUN = "run/"
"""What comes before the directory of a run, as a group does before an option."""


def run(settings: CpConfig, job: Job) -> Summary:
    what, where = settings.source, settings.target
    if what is None or where is None:
        raise ConfigError("give what to copy and the new file: gpipe cp recipe/digits conf/recipes/mine.yaml")
    run = _run_directory(what)
    if run is not None:
        facts = _copy_run(run, Path(where))
    else:
        topic, option = _find_option(what)
        target = _write(option.path.read_bytes(), _target(Path(where), option.path.name))
        facts = {"from": f"{topic}/{option.name}", "to": str(target), "use": _use(topic, target)}
    for name, value in facts.items() if job.shows_result else ():
        sys.stdout.write(f"{name:<5} {value}\n")
    return facts


def _find_option(what: str) -> tuple[str, Option]:
    group, slash, name = what.partition("/")
    if not slash:
        raise ConfigError(
            f"'{what}': give a group and an option, such as recipe/digits or model/resnet101, or run/<directory>"
        )
    topic = topic_of(group)
    by_name = {option.name: option for option in list_options(topic)}
    if name not in by_name:
        raise ConfigError(f"{what}: no such option; {or_list(name, by_name)}")
    return topic, by_name[name]


def _run_directory(what: str) -> Path | None:
    """The run that the words name: `run/` and its path, or just its path; None for an option."""
    for name in (what.removeprefix(RUN), what):
        if has_settings(Path(name)):
            return Path(name)
    return Path(what.removeprefix(RUN)) if what.startswith(RUN) else None


def _copy_run(run: Path, where: Path) -> dict[str, str]:
    """Write what a run was started with as a file for `config=`: its options, and the keys that are not the default."""
    source = run / "config.yaml"
    if not source.is_file():
        raise RunError(f"{RUN}{run}: not a run directory: it has no config.yaml")
    saved = load_saved(source)
    if not is_saved(saved):
        raise RunError(f"{source}: not the configuration of a run")
    command = saved_command(saved)
    target = _target(where, f"{run.resolve().name}.yaml")
    use = ["gpipe", command, f"config={target}"]
    allow = saved.get("allow")
    if isinstance(allow, list) and allow:
        use.append(f"allow=[{','.join(map(str, allow))}]")
    line = shlex.join(use)
    text = dump_mapping(readable(saved, recorded_words(run)))
    _write(
        f"# The settings of {one_line(str(run))}; use them with: {one_line(line)}\n{text}".encode(), target
    )
    return {"from": f"{RUN}{run}", "to": str(target), "use": line}


def readable(saved: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """A saved configuration for people to change: without defaults, and with the options that the words chose."""
    command = saved_command(saved)
    options = chosen_options(command, words)
    defaults = asdict(SCHEMAS[command]())
    shown: dict[str, Any] = {}
    for key, value in saved.items():
        if key in LAUNCH_KEYS or value == defaults.get(key):
            continue
        default, option = defaults.get(key), options.get(key)
        shown[key] = value
        if isinstance(value, dict) and isinstance(default, dict):
            own = default if option is None else default | load_mapping(option.path)
            own.pop("defaults", None)
            changes = {
                name: member for name, member in value.items() if name not in own or own[name] != member
            }
            # An option with keys that the run does not have has grown since.
            if own.keys() <= value.keys() and "_target_" not in changes:
                shown[key] = {OPTION: option.name, **changes} if option is not None else changes
            if option is not None and shown[key] == {OPTION: option.name}:
                shown[key] = option.name
    return shown


def _target(where: Path, name: str) -> Path:
    """The file to write, in a folder under the same name as before."""
    target = where / name if where.is_dir() else where
    if target.suffix != ".yaml":
        raise ConfigError(f"{target}: the name must end in .yaml, or gpipe does not find the option")
    return target


def _write(content: bytes, target: Path) -> Path:
    """Write a new file; never replace one."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as copy:
            copy.write(content)
    except FileExistsError as error:
        raise ConfigError(f"{target}: exists; give another name, or remove it") from error
    except OSError as error:
        raise ResourceError(f"{target}: cannot be written: {error}") from error
    return target


def _use(topic: str, target: Path) -> str:
    """How to use the copy: gpipe finds an option in a folder that has the name of its group."""
    if target.absolute().parent.name != topic and topic == "recipes":
        return shlex.join(["gpipe", "train", f"config={target}"])
    if target.absolute().parent.name != topic:
        return f"put it into a folder {topic}/, and give the folder above it as --config-dir"
    key = "recipe" if topic == "recipes" else topic
    above = str(target.parent.parent)
    return shlex.join(["gpipe", "train", "--config-dir", above, f"{key}={target.stem}"])
