"""gpipe cp: copy a recipe or option to a file of your own, to change it. Imports neither Hydra nor torch."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

from gpipe_cli.arguments import Invocation
from gpipe_cli.commands.ls import topic_of
from gpipe_cli.config.options import Option, list_options
from gpipe_cli.errors import ConfigError, ResourceError, or_list


def run(invocation: Invocation) -> None:
    if len(invocation.words) != 2:
        raise ConfigError("give what to copy and the new file: gpipe cp recipe/digits conf/recipes/mine.yaml")
    what, where = invocation.words
    topic, option = _find_option(what)
    target = _copy(option.path, Path(where))
    facts = {"from": f"{topic}/{option.name}", "to": str(target), "use": _use(topic, target)}
    if invocation.json:
        sys.stdout.write(f"{json.dumps(facts)}\n")
        return
    for name, value in facts.items():
        sys.stdout.write(f"{name:<5} {value}\n")


def _find_option(what: str) -> tuple[str, Option]:
    group, slash, name = what.partition("/")
    if not slash:
        raise ConfigError(f"'{what}': give a group and an option, such as recipe/digits or model/resnet101")
    topic = topic_of(group)
    by_name = {option.name: option for option in list_options(topic)}
    if name not in by_name:
        raise ConfigError(f"{what}: no such option; {or_list(name, by_name)}")
    return topic, by_name[name]


def _copy(source: Path, target: Path) -> Path:
    """Copy to the file, or into the folder under the same name; never replace a file."""
    if target.is_dir():
        target = target / source.name
    if target.suffix != ".yaml":
        raise ConfigError(f"{target}: the name must end in .yaml, or gpipe does not find the option")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as original, target.open("xb") as copy:
            shutil.copyfileobj(original, copy)
    except FileExistsError as error:
        raise ConfigError(f"{target}: exists; give another name, or remove it") from error
    except OSError as error:
        raise ResourceError(f"{target}: cannot be written: {error}") from error
    return target


def _use(topic: str, target: Path) -> str:
    """How to use the copy: gpipe finds an option in a folder that has the name of its group."""
    if target.absolute().parent.name != topic:
        return f"put it into a folder {topic}/, and give the folder above it as --config-dir"
    key = "recipe" if topic == "recipes" else topic
    above = str(target.parent.parent)
    return shlex.join(["gpipe", "train", "--config-dir", above, f"{key}={target.stem}"])
