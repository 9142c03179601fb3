"""From YAML and overrides to a typed, checked configuration.

`compose_all` composes what a command line asks for, so that every mistake becomes one ConfigError. `settings_of`
turns a composed tree into the dataclass of the command and loses no key on the way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, final

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gpipe_cli.config.check import check, check_numbers
from gpipe_cli.config.composing import CUSTOM, NODE, check_choices, composer
from gpipe_cli.config.environment import watch_environment
from gpipe_cli.config.fields import fields
from gpipe_cli.config.locate import conf_dir, options, takes_recipes
from gpipe_cli.config.recipes import SCALE_KEY, SMALL
from gpipe_cli.config.references import check_references
from gpipe_cli.config.schema import COMPONENT_GROUPS, GROUPS, SCHEMAS, ModelConfig
from gpipe_cli.config.suggest import did_you_mean, or_list
from gpipe_cli.config.targets import check_targets
from gpipe_cli.config.yaml_files import load_yaml
from gpipe_cli.errors import ConfigError

KINDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "text"}


@dataclass(frozen=True)
class Request:
    """What is composed: the command's primary config, or another one by name, and where else to look."""

    command: str
    overrides: tuple[str, ...]
    config_name: str | None = None
    config_dir: str | None = None


@final
@dataclass(frozen=True)
class Composed:
    """The configuration of one job."""

    overrides: tuple[str, ...]
    """As they were given to Hydra: references unresolved, so they may be saved."""
    tree: DictConfig
    """References unresolved here too."""
    choices: Mapping[str, Any]
    """The option chosen of each group."""


@final
@dataclass(frozen=True)
class Composition:
    """What a command line asks for: one job, or those of a sweep."""

    request: Request
    overrides: tuple[str, ...]
    first: Composed

    @property
    def config_name(self) -> str:
        return self.request.config_name or self.request.command

    def jobs(self) -> Iterator[tuple[str, ...]]:
        """The overrides of each job: every combination of the values given, the last key changing fastest."""
        with composer(self.request.command, self.request.config_dir):
            parsed = _parse(self.overrides)
        yield from product(*(_values(one) for one in parsed))

    def compose(self, overrides: tuple[str, ...]) -> Composed:
        if overrides == self.first.overrides:
            return self.first
        with composer(self.request.command, self.request.config_dir), _as_config_error(self.request.command):
            return _compose(self.request, overrides)


def compose_all(request: Request, *, complete: bool = True, multirun: bool = False) -> Composition:
    """Compose and check what a command line asks for.

    With `complete` off only the composition is judged, as `--cfg` may show an unfinished configuration.
    A sweep is checked value by value, each with the first values of the other keys.
    """
    with composer(request.command, request.config_dir), _as_config_error(request.command):
        # The components may be those of an earlier run, so their keys need not be those of the defaults.
        of_a_run = request.command == "eval" or any(word.startswith("resume=") for word in request.overrides)
        asked = _forced(request.overrides, COMPONENT_GROUPS if of_a_run else ())
        recipe = any(word.startswith("recipes=") for word in asked)
        if recipe and (not takes_recipes(request.command) or (of_a_run and "resume=auto" not in asked)):
            who = f"{request.command} resume=..." if request.command == "train" else request.command
            raise ConfigError(f"recipe: gpipe {who} takes none, its settings are those of its run")
        parsed = _parse(asked)
        several = [one for one in parsed if one.is_sweep_override()]
        if several and not multirun:
            raise ConfigError(
                f"{several[0].input_line}: several values need -m (a sweep), or [..] for a list"
            )
        replaced = [
            group
            for group in COMPONENT_GROUPS
            if any(one.key_or_group == f"{group}._target_" for one in parsed)
        ]
        probed = []
        for overrides in _probes(parsed):
            composed = _compose(request, _without_predecessors(overrides, replaced))
            if newly := [group for group in _replaced(composed, request) if group not in replaced]:
                replaced += newly
                composed = _compose(request, _without_predecessors(overrides, replaced))
            if complete:
                settings_of(composed.tree, request.command, request.overrides)
            probed.append(composed)
        return Composition(request, tuple(_without_predecessors(asked, replaced)), probed[0])


def settings_of(tree: DictConfig, command: str, overrides: Sequence[str]) -> ModelConfig:
    """The typed configuration: no key lost, none unknown, every value judged."""
    watch_environment()
    with _as_config_error(command):
        check_references(OmegaConf.to_container(tree))
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
        assert isinstance(plain, dict)
        check_numbers(plain)
        settings = typed({str(key): value for key, value in plain.items()}, command)
    _check_allow(settings, overrides)
    check_targets(
        {group: getattr(settings, group) for group in COMPONENT_GROUPS if hasattr(settings, group)},
        settings.allow,
    )
    check(settings)
    return settings


def typed(plain: dict[str, Any], command: str) -> ModelConfig:
    """The command's dataclass from a plain mapping that must hold each of its keys and no other."""
    schema = SCHEMAS[command]
    for name in schema.__dataclass_fields__:
        if name not in plain:
            raise ConfigError(f"'{name}' was removed, but it is required")
    # Merging into the schema raises on an unknown key, where to_object alone would drop it silently.
    merged = OmegaConf.merge(OmegaConf.structured(schema), plain)
    settings = OmegaConf.to_object(merged)
    assert isinstance(settings, ModelConfig)
    return settings


def _check_allow(settings: ModelConfig, overrides: Sequence[str]) -> None:
    """`allow` opens the door to code, so only the person at the command line may set it, never a file."""
    given = [word for word in overrides if word.lstrip("+").startswith("allow=")]
    if any("${" in word for word in given):
        raise ConfigError(f"{given[0]}: write the names of the packages out; a reference may change unseen")
    if settings.allow and not given:
        names = ",".join(settings.allow)
        raise ConfigError(
            f"allow=[{names}]: may only be given on the command line, not in a file; add it there if you trust them"
        )
    for package in settings.allow:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", package):
            raise ConfigError(f"allow={settings.allow}: {package!r} is no package name")


def _compose(request: Request, overrides: Sequence[str]) -> Composed:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "a composer is open"
    tree = hydra.compose_config(
        config_name=request.config_name or request.command, overrides=list(overrides), run_mode=RunMode.RUN
    )
    choices = dict(tree.hydra.runtime.choices)
    check_choices(choices)
    own = OmegaConf.masked_copy(tree, [str(key) for key in tree if key != NODE])
    check_references(OmegaConf.to_container(own))
    return Composed(tuple(overrides), own, choices)


def _parse(overrides: Sequence[str]) -> list[Override]:
    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"'{word}' is neither a flag nor key=value")
    parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(overrides))
    for one in parsed:
        if re.split(r"[./@]", one.key_or_group)[0] == NODE or (one.package or "").partition(".")[0] == NODE:
            raise ConfigError(
                f"{one.input_line}: gpipe runs its jobs itself and takes no key of Hydra; leave it out"
            )
        if one.is_sweep_override() and not one.is_discrete_sweep():
            raise ConfigError(f"{one.input_line}: a sweep needs single values, such as a,b or range(1,5)")
        if one.key_or_group in GROUPS and isinstance(one.value(), int | float | list | dict):
            names = [option.name for option in options(one.key_or_group)]
            hint = f"balance=manual balance.layers={one.get_value_element_as_str()}"
            cure = hint if one.key_or_group == "balance" else or_list("", names)
            raise ConfigError(f"{one.input_line}: choose an option by its name; {cure}")
    return parsed


def _probes(parsed: Sequence[Override]) -> Iterator[list[str]]:
    """One list of plain overrides for every value of every swept key."""
    values = [_values(one) for one in parsed]
    first = [choices[0] for choices in values]
    yield first
    for position, others in enumerate(values):
        for value in others[1:]:
            yield [*first[:position], value, *first[position + 1 :]]


def _values(override: Override) -> list[str]:
    """The override, or one of each value it has in a sweep."""
    if override.is_discrete_sweep():
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    assert override.input_line is not None
    return [override.input_line]


def _without_predecessors(overrides: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Start each of the groups from nothing: its option gives way to what is given."""
    kept = [word for word in overrides if word.partition("=")[0] not in groups]
    return [*(f"{group}={CUSTOM}" for group in groups), *_forced(kept, groups)]


def _forced(overrides: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Overrides whose keys below the groups may be new without a plus sign."""
    return [
        f"++{word.lstrip('+')}" if word[0] != "~" and word.lstrip("+").partition(".")[0] in groups else word
        for word in overrides
    ]


def _replaced(composed: Composed, request: Request) -> list[str]:
    """Open groups whose `_target_` is not the one of the option chosen: that option's keys must not linger."""
    found = []
    for group in COMPONENT_GROUPS:
        choice = composed.choices.get(group)
        target = OmegaConf.select(composed.tree, f"{group}._target_", throw_on_missing=False)
        if choice not in (None, CUSTOM) and target not in (None, _own_target(request, group, choice)):
            found.append(group)
    return found


def _own_target(request: Request, group: str, choice: str) -> str | None:
    """What the option's file itself names; ours come first, as in the search path."""
    folders = [Path(request.config_dir)] if request.config_dir else []
    for folder in (conf_dir(), *folders):
        path = folder / group / f"{choice}.yaml"
        if path.exists():
            target: str | None = OmegaConf.select(load_yaml(path), "_target_", throw_on_missing=False)
            return target
    return None


@contextmanager
def _as_config_error(command: str) -> Iterator[None]:
    """Everything Hydra and OmegaConf raise over a configuration, as one line."""
    try:
        yield
    except MissingConfigException as error:
        raise ConfigError(_missing_option(error)) from error
    except OverrideParseException as error:
        key, _, value = str(error.override).partition("=")
        raise ConfigError(
            f"{error.override}: cannot be read ({_first_line(error)}); if the value is text, put it in quotes that the "
            f"shell leaves alone: \"{key}='{value}'\""
        ) from error
    except (HydraException, OmegaConfBaseException, ValueError, ArithmeticError) as error:
        raise ConfigError(_describe(error, command)) from error
    except RecursionError as error:
        raise ConfigError("configuration: references are nested too deeply, or contain themselves") from error


def _missing_option(error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file)
    group, _, option = missing.rpartition("/")
    available = [name for name in (error.options or []) if name != CUSTOM]
    if group == f"recipes/{SMALL}":
        small = or_list(option, [one.name for one in options(group)])
        return f"recipe={option} {SCALE_KEY}={SMALL}: no recipe of that name has that scale, leave it out; {small}"
    label = "recipe" if group == "recipes" else group
    wanted = f"{label}={option}: no such option" if group else _no_primary(missing)
    return f"{wanted}; {or_list(option, available)}" if available else wanted


def _no_primary(name: str) -> str:
    return f"--config-name {name}: no such config; it is looked for in the folder given as --config-dir"


def _describe(error: Exception, command: str) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    whole = " ".join(str(error).split())
    key = getattr(cause, "full_key", None) or ""
    unknown = re.search(r"Key '(.+?)' (?:is )?not in|Could not override '(.+?)'", f"{cause} {whole}")
    if unknown:
        key = key or next(name for name in unknown.groups() if name)
        hint = did_you_mean(key, _known_keys(command)) or f"see `gpipe {command} --help` for every key"
        place = re.match(r"In '(.+?)':", whole)
        return f"unknown key '{key}'{f' in {place[1]}.yaml' if place else ''}; {hint}"
    line = re.search(r"Error merging override (.+)", str(error))
    return f"{line[1] if line else key or 'configuration'}: {_reason(cause, key)}"


def _reason(error: Exception, key: str) -> str:
    text = _first_line(error)
    if wrong := re.search(r"could not be converted to (\w+)", text):
        return f"expected {KINDS.get(wrong[1], wrong[1])}"
    if "is not a valid bool" in text:
        return f"expected {KINDS['Boolean']}"
    if isinstance(error, MissingMandatoryValue):
        return "must be given"
    if "is not Optional" in text:
        return "must not be null"
    if "is not a subclass of" in text:
        return f"holds several keys; set one of them, {key}.<key>=..."
    return f"{text[0].lower()}{text[1:]}"


def _known_keys(command: str) -> list[str]:
    """Every key that exists: those of the schema and those of the shipped options of each group."""
    inside = [f"{group}.{key}" for group in GROUPS for option in options(group) for key in option.keys]
    of_recipes = [SCALE_KEY] if takes_recipes(command) else []
    return [*(one.key for one in fields(command)), *dict.fromkeys(inside), *of_recipes]


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
