"""From YAML files and overrides to typed, checked settings. Each job is composed once.

`compose` judges a whole command line before the first job runs, so that every mistake becomes one ConfigError.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, final

from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from gpipe_cli.config.checks import check, check_numbers
from gpipe_cli.config.composition_errors import config_errors
from gpipe_cli.config.hydra_loader import (
    CUSTOM,
    HYDRA_NODE,
    GuardedLoader,
    check_hydra_choices,
    notes_on_replaced,
    open_hydra,
)
from gpipe_cli.config.options import list_options, takes_recipes
from gpipe_cli.config.overrides import (
    escape_references,
    group_to_recipe,
    override_group,
    override_key,
    sets_key,
    without_keys,
)
from gpipe_cli.config.schema import (
    COMPONENT_GROUPS,
    GROUPS,
    NO_EFFECT,
    SCHEMAS,
    ModelConfig,
    PlanConfig,
    TrainConfig,
    TrainedConfig,
)
from gpipe_cli.config.targets import check_targets
from gpipe_cli.config.yaml_files import check_references
from gpipe_cli.errors import ConfigError, or_list
from gpipe_cli.redaction import remember
from gpipe_cli.schedule.own_orders import AUTO


@final
@dataclass(frozen=True)
class Request:
    """What to compose: the overrides of a command line, and where to look for files besides conf/ and recipes/."""

    command: str
    overrides: tuple[str, ...]
    config_name: str | None = None
    config_dir: str | None = None

    @property
    def continues_run(self) -> bool:
        """Whether the components may be those of an earlier run, with keys that the default options do not list."""
        return issubclass(SCHEMAS[self.command], TrainedConfig) or any(
            override_key(word) == "resume" for word in self.overrides
        )


@final
@dataclass(frozen=True)
class JobConfig:
    """The configuration of one job."""

    overrides: tuple[str, ...]
    """As given to Hydra, with references unresolved, so they may be saved."""
    tree: DictConfig
    """The composed configuration, again with references unresolved."""
    choices: Mapping[str, Any]
    """The option chosen in each group."""
    settings: ModelConfig
    """The typed configuration, with references resolved."""
    notes: tuple[str, ...] = ()
    """Lines about the configuration that the user should read."""

    def with_values(self, **values: Any) -> JobConfig:
        """The same job with other values of some top-level keys, and the overrides that were given."""
        tree = OmegaConf.merge(self.tree, values)
        assert isinstance(tree, DictConfig)
        return replace(self, tree=tree, settings=replace(self.settings, **values))


@final
class Composition:
    """The jobs that a command line asks for: one, or those of a sweep."""

    def __init__(self, request: Request, overrides: Sequence[tuple[str, ...]]) -> None:
        self.request = request
        self.jobs = overrides
        """The overrides of each job: every combination of the given values, the last key changing fastest."""
        self._composed: dict[tuple[str, ...], JobConfig] = {}

    def job(self, overrides: tuple[str, ...]) -> JobConfig:
        if overrides not in self._composed:
            with open_hydra(self.request.command, self.request.config_dir) as hydra:
                self.compose(hydra, overrides)
        return self._composed[overrides]

    def compose(self, hydra: Hydra, overrides: tuple[str, ...]) -> None:
        with config_errors(self.request.command):
            tree, chosen = _compose_tree(hydra, self.request, overrides)
        replaced = _loader(hydra).replaced_groups
        choices = {**chosen, **dict.fromkeys(replaced, CUSTOM)}
        recorded = [
            *(f"{group}={CUSTOM}" for group in replaced),
            *(word for word in overrides if override_key(word) not in replaced),
        ]
        own = _without_hydra(tree)
        settings = settings_of(own, self.request.command, self.request.overrides)
        _check_plan_keys(settings, overrides)
        plain: Any = OmegaConf.to_container(own)
        notes = [*notes_on_replaced(plain, chosen, overrides)]
        if note := overridden_epochs(settings, overrides):
            notes.append(note)
        self._composed[overrides] = JobConfig(tuple(recorded), own, choices, settings, tuple(notes))

    def digest(self, without: Sequence[str]) -> str:
        """A fingerprint of all jobs, whatever the values of the keys in `without`.

        Every value of every key has been composed at least once, so it covers the content of all files in use.
        """
        words = [sorted(without_keys(job, without)) for job in self.jobs]
        trees = [OmegaConf.to_container(config.tree) for config in self._composed.values()]
        kept = [
            {key: value for key, value in tree.items() if key not in without}
            for tree in trees
            if isinstance(tree, dict)
        ]
        content = json.dumps([self.request.command, words, kept], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()


def compose(request: Request, *, multirun: bool = False) -> Composition:
    """Compose and check what a command line asks for.

    A sweep is checked value by value, each with the first values of the other keys; the remaining combinations are
    composed when their turn comes.
    """
    with open_hydra(request.command, request.config_dir) as hydra:
        with config_errors(request.command):
            values = _parse(hydra, request, multirun=multirun)
        composition = Composition(request, list(product(*values)))
        first = tuple(choices[0] for choices in values)
        composition.compose(hydra, first)
        for position, choices in enumerate(values):
            for value in choices[1:]:
                composition.compose(hydra, (*first[:position], value, *first[position + 1 :]))
    return composition


def compose_tree(request: Request) -> DictConfig:
    """The composed tree with its `hydra` node, for printing; it may be an unfinished configuration."""
    with open_hydra(request.command, request.config_dir) as hydra, config_errors(request.command):
        _parse(hydra, request, multirun=False)
        return _compose_with_hydra(hydra, request, _prepared(hydra, request, request.overrides))


def compose_plain(request: Request) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The composed configuration as plain values, references as text; and the option chosen in each group."""
    with open_hydra(request.command, request.config_dir) as hydra, config_errors(request.command):
        _parse(hydra, request, multirun=False)
        tree, choices = _compose_tree(hydra, request, request.overrides)
    return _plain(tree), choices


def _without_hydra(tree: DictConfig) -> DictConfig:
    if HYDRA_NODE in tree:
        return OmegaConf.masked_copy(tree, [str(key) for key in tree if key != HYDRA_NODE])
    # As a copy would be: it takes keys that the command does not have.
    OmegaConf.set_struct(tree, None)
    return tree


def _plain(tree: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(_without_hydra(tree))
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def settings_of(tree: DictConfig, command: str, overrides: Sequence[str]) -> ModelConfig:
    """The typed configuration: no key lost, none unknown, every value checked."""
    _hide_environment_values()
    with config_errors(command):
        check_references(OmegaConf.to_container(tree))
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
        assert isinstance(plain, dict)
        check_numbers(plain)
        settings = typed({str(key): value for key, value in plain.items()}, command)
    _check_allow(settings, overrides)
    components = {group: getattr(settings, group) for group in COMPONENT_GROUPS if hasattr(settings, group)}
    check_targets(components, settings.allow)
    check(settings)
    return settings


def typed(plain: dict[str, Any], command: str) -> ModelConfig:
    """The command's dataclass from a plain mapping, which must have each of its keys and no other."""
    schema = SCHEMAS[command]
    for name in schema.__dataclass_fields__:
        if name not in plain:
            raise ConfigError(f"'{name}' was removed, but it is required")
    # Merging into the schema raises on an unknown key, where to_object alone would drop it silently.
    # The mapping is resolved, so what still looks like a reference in it is text.
    settings = OmegaConf.to_object(OmegaConf.merge(_structured(command), _escaped(plain)))
    assert isinstance(settings, ModelConfig)
    return settings


@cache
def _structured(command: str) -> DictConfig:
    """The command's schema; merging copies it, and building it takes a tenth of a composition."""
    structured = OmegaConf.structured(SCHEMAS[command])
    assert isinstance(structured, DictConfig)
    return structured


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return escape_references(value)
    if isinstance(value, dict):
        return {key: _escaped(member) for key, member in value.items()}
    return [_escaped(member) for member in value] if isinstance(value, list) else value


@cache
def _hide_environment_values() -> None:
    """Keep the values of `${oc.env:NAME}`, which may be secrets, out of log files."""

    def resolve(name: str, *default: Any) -> Any:
        value = oc.env(name, *default)
        remember(name, value)
        return value

    OmegaConf.register_new_resolver("oc.env", resolve, replace=True)


def _check_allow(settings: ModelConfig, overrides: Sequence[str]) -> None:
    """Only the command line may set `allow`, which lets a configuration run code; a file never may."""
    given = [word for word in overrides if override_key(word) == "allow"]
    if any("${" in word for word in given):
        raise ConfigError(
            f"{given[0]}: write out the names of the packages; a reference may change unnoticed"
        )
    if settings.allow and not given:
        names = ",".join(settings.allow)
        raise ConfigError(
            f"allow=[{names}]: may only be given on the command line, not in a file; add it there if you trust them"
        )
    for package in settings.allow:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", package):
            raise ConfigError(f"allow={settings.allow}: {package!r} is not a package name")


def _check_plan_keys(settings: ModelConfig, overrides: Sequence[str]) -> None:
    """Refuse limits of a search that does not take place."""
    used = {
        "plan.verify_budget": (isinstance(settings, PlanConfig) and settings.verify, "gpipe plan verify=true")
    }
    if isinstance(settings, TrainConfig):
        used["plan.budget"] = (settings.plan.auto, "plan=auto")
        searches = settings.plan.auto or settings.schedule.name == AUTO
        used["plan.cache"] = (searches, "plan=auto or schedule=auto")
    for key, (is_used, needed) in used.items():
        if sets_key(overrides, key) and not is_used:
            raise ConfigError(f"{key}: has no effect without {needed}; remove it")


def overridden_epochs(settings: ModelConfig, overrides: Sequence[str]) -> str | None:
    """A line about `epochs` that have no effect, because a recipe or the run to resume has `steps`."""
    steps = settings.steps if isinstance(settings, TrainConfig) else None
    if steps is None or sets_key(overrides, "steps") or not sets_key(overrides, "epochs"):
        return None
    return f"epochs has no effect, because a file sets steps={steps}, which overrides it; add steps=null"


def _loader(hydra: Hydra) -> GuardedLoader:
    loader = hydra.config_loader
    assert isinstance(loader, GuardedLoader)
    return loader


def _prepared(hydra: Hydra, request: Request, overrides: Sequence[str]) -> list[str]:
    """Tell the loader what it may replace; the overrides as Hydra takes them."""
    loader = _loader(hydra)
    loader.open_groups = frozenset(COMPONENT_GROUPS if request.continues_run else ())
    loader.given_targets = frozenset(
        override_group(word) for word in overrides if override_key(word).endswith("._target_")
    ).intersection(COMPONENT_GROUPS)
    # A component's own keys need not be listed in its YAML, so there `+key` also sets a key that is listed.
    return [
        f"++{word.lstrip('+')}" if word[0] == "+" and override_group(word) in COMPONENT_GROUPS else word
        for word in overrides
    ]


def _compose_tree(
    hydra: Hydra, request: Request, overrides: Sequence[str]
) -> tuple[DictConfig, Mapping[str, Any]]:
    """The composed tree, and the option chosen in each group."""
    words = _prepared(hydra, request, overrides)
    try:
        tree, choices = _loader(hydra).compose_without_hydra(request.config_name or request.command, words)
    except (HydraException, OmegaConfBaseException):
        # A file may have named an option of Hydra's own groups: only with those does Hydra find the actual mistake.
        tree = _compose_with_hydra(hydra, request, words)
        return tree, tree.hydra.runtime.choices
    check_references(_plain(tree))
    return tree, choices


def _compose_with_hydra(hydra: Hydra, request: Request, words: list[str]) -> DictConfig:
    tree = hydra.compose_config(
        config_name=request.config_name or request.command, overrides=words, run_mode=RunMode.RUN
    )
    check_hydra_choices(tree.hydra.runtime.choices)
    check_references(_plain(tree))
    return tree


def _parse(hydra: Hydra, request: Request, *, multirun: bool) -> list[list[str]]:
    """For each override the plain overrides it stands for: itself, or those of a sweep's values."""
    words = request.overrides
    if any(override_key(word) == "recipes" for word in words) and (
        not takes_recipes(request.command) or (request.continues_run and "resume=auto" not in words)
    ):
        command = f"{request.command} resume=..." if request.command == "train" else request.command
        raise ConfigError(f"recipe: gpipe {command} takes none; its settings are those of its run")
    for word in words:
        if "=" not in word and not word.startswith("~"):
            is_file = word.endswith((".yaml", ".yml"))
            cure = f"did you mean config={word}?" if is_file else f"see `gpipe {request.command} --help`"
            raise ConfigError(f"'{word}' is neither a flag nor key=value; {cure}")
        if override_group(word) in NO_EFFECT.get(request.command, ()):
            raise ConfigError(f"{override_key(word)}: has no effect on gpipe {request.command}; leave it out")
    parsed = OverridesParser.create(hydra.config_loader).parse_overrides(list(words))
    for override in parsed:
        _check_override(override)
    swept = [override for override in parsed if override.is_sweep_override()]
    if swept and not multirun:
        raise ConfigError(f"{swept[0].input_line}: several values need -m (a sweep), or [..] for a list")
    return [_sweep_values(override) for override in parsed]


def _check_override(override: Override) -> None:
    key, line = override.key_or_group, override.input_line
    if re.split(r"[./@]", key)[0] == HYDRA_NODE or (override.package or "").partition(".")[0] == HYDRA_NODE:
        raise ConfigError(f"{line}: gpipe does not accept keys of Hydra; leave it out")
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ConfigError(f"{line}: a sweep needs single values, such as a,b or range(1,5)")
    if key not in (*GROUPS, "recipes") or override.is_delete() or override.is_sweep_override():
        return
    value = override.value()
    # Hydra would resolve a reference, to whatever it may be.
    if not isinstance(value, str) or "${" in value:
        manual = f"balance=manual balance.layers={override.get_value_element_as_str()}"
        names = [option.name for option in list_options(key)]
        cure = manual if key == "balance" and isinstance(value, list) else or_list("", names)
        shown = "".join(group_to_recipe([str(line)]))
        raise ConfigError(f"{shown}: choose an option by its name; {cure}")


def _sweep_values(override: Override) -> list[str]:
    if override.is_discrete_sweep():
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    assert override.input_line is not None
    return [override.input_line]
