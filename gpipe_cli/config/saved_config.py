"""A run's config.yaml, which lists every key of every component, reduced to the options and keys that were chosen.

That makes a file that people can read and change. It composes to the same configuration, because a key is left out
only if it has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from gpipe_cli.config.compose import Request, compose_plain
from gpipe_cli.config.file_words import OPTION
from gpipe_cli.config.options import list_options
from gpipe_cli.config.overrides import quoted
from gpipe_cli.config.schema import COMPONENT_GROUPS, GROUPS, NO_EFFECT, SCHEMAS
from gpipe_cli.config.yaml_files import load_mapping

LAUNCH_KEYS = ("allow", "resume", "reset_optimizer", "run_dir")
"""Keys of one launch; another run does not take them over."""
ABSENT: Mapping[str, Mapping[str, Any]] = {"optimizer": {"no_decay": []}}
"""What it means that an older run lacks a key, where the default of today is another."""


def is_saved(plain: Mapping[Any, Any]) -> bool:
    """Whether it is the complete configuration of a run: `allow`, and every component with its `_target_`."""
    components = [value for key, value in plain.items() if key in COMPONENT_GROUPS]
    return (
        "allow" in plain
        and "model" in plain
        and all(isinstance(component, dict) and "_target_" in component for component in components)
    )


def saved_command(saved: Mapping[str, Any]) -> str:
    """The command that saved it."""
    return "profile" if "timeline" in saved else "train"


def reduce_saved(saved: Mapping[str, Any], command: str) -> tuple[dict[str, Any], list[str]]:
    """What the command takes of a saved configuration, without defaults; and the keys that it does not have."""
    everywhere = {field.name for schema in SCHEMAS.values() for field in fields(schema)}
    source = saved_command(saved)
    shared = _shared_keys(source, command)
    taken = {
        key: value
        for key, value in saved.items()
        if key not in LAUNCH_KEYS and (key in shared or key not in everywhere)
    }
    left_out = [key for key in saved if key in everywhere and key not in (*shared, *LAUNCH_KEYS)]
    if source != command:
        taken = _without_untouched_groups(taken, source)
    return _without_defaults(taken, command), left_out


def _shared_keys(source: str, command: str) -> set[str]:
    """The keys that mean the same to both commands: those of the classes that both derive from."""
    classes = set(SCHEMAS[source].__mro__) & set(SCHEMAS[command].__mro__)
    names = {field.name for cls in classes if is_dataclass(cls) for field in fields(cls)}
    return names - set(NO_EFFECT.get(command, ()))


def _without_untouched_groups(taken: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Leave out the groups that the user left to the defaults of `source`, since another command has its own.

    gpipe train balances by time, for example, and gpipe plan searches for a balance unless one is given.
    """
    model = _option_word("model", _nearest_option("model", taken["model"]), taken["model"])
    untouched, _ = compose_plain(Request(source, tuple(model)))
    return {
        key: value
        for key, value in taken.items()
        if key == "model" or key not in GROUPS or value != untouched.get(key)
    }


def _without_defaults(taken: Mapping[str, Any], command: str) -> dict[str, Any]:
    options = {group: _nearest_option(group, taken[group]) for group in GROUPS if group in taken}
    words = {group: _option_word(group, name, taken[group]) for group, name in options.items()}
    # The model picks matching options of other groups, so what it leaves to choose is known only with it.
    _, choices = compose_plain(Request(command, tuple(words["model"])))
    chosen = {
        group: name
        for group, name in options.items()
        if name is not None and (group == "model" or name != choices.get(group))
    }
    custom = [group for group, name in options.items() if name is None]
    all_words = (word for group in (*chosen, *custom) for word in words[group])
    defaults, _ = compose_plain(Request(command, tuple(all_words)))
    reduced: dict[str, Any] = {}
    for key, value in taken.items():
        default = defaults.get(key)
        if key in custom or not isinstance(value, dict) or not isinstance(default, dict):
            if value != default or key in custom:
                reduced[key] = value
            continue
        absent = {name: old for name, old in ABSENT.get(key, {}).items() if name in default}
        changes = _changes({**absent, **value}, default, plus="+" if key in COMPONENT_GROUPS else "")
        if key in chosen:
            reduced[key] = {OPTION: chosen[key], **changes} if changes else chosen[key]
        elif changes:
            reduced[key] = changes
    return reduced


def _nearest_option(group: str, mapping: Mapping[str, Any]) -> str | None:
    """The shipped option with the same `_target_` that differs in the fewest keys."""
    target = mapping.get("_target_")
    differences = {
        option.name: sum(
            mapping.get(key) != value for key, value in load_mapping(option.path).items() if key != "defaults"
        )
        for option in list_options(group)
        if option.target == target
    }
    nearest = min(differences, key=lambda name: differences[name], default=None)
    # Without a target, as in a schedule, only equal keys make it the same option.
    return nearest if nearest is None or target is not None or differences[nearest] == 0 else None


def _option_word(group: str, option: str | None, mapping: Mapping[str, Any]) -> list[str]:
    if option is not None:
        return [f"{group}={option}"]
    return [f"{group}._target_={quoted(str(mapping['_target_']))}"] if "_target_" in mapping else []


def _changes(mapping: Mapping[str, Any], default: Mapping[str, Any], plus: str) -> dict[str, Any]:
    """The keys that differ; plus: what to put before a key that the default does not have."""
    changes: dict[str, Any] = {}
    for key, value in mapping.items():
        before = default.get(key)
        if key not in default:
            changes[f"{plus}{key}"] = value
        elif isinstance(value, dict) and isinstance(before, dict) and value != before:
            changes[key] = _changes(value, before, "")
        elif value != before:
            changes[key] = value
    return changes
