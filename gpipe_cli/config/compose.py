"""From YAML files and the words of a command line to typed, checked settings, by Hydra's public API.

`compose` makes one job, `sweep_words` says which values a sweep has. Every mistake, also one
that Hydra or OmegaConf raise, is a ConfigError of one line with the key, the value and a hint.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final, get_args, get_type_hints

import hydra
from hydra import initialize
from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import (
    BooleanNode,
    Container,
    DictConfig,
    FloatNode,
    IntegerNode,
    OmegaConf,
    StringNode,
)
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError
from omegaconf.resolvers import oc

from gpipe_cli.config.checks import check, check_numbers
from gpipe_cli.config.instantiate import type_mismatch, union_members
from gpipe_cli.config.job import Job, Rank
from gpipe_cli.config.keys import check_words, hint_for_unknown, list_options
from gpipe_cli.config.schema import (
    COMPONENT_GROUPS,
    GROUPS,
    SCHEMAS,
    CommandConfig,
    ModelConfig,
    TrainConfig,
)
from gpipe_cli.config.sources import (
    VERSION,
    Composing,
    fit_components,
    register_resolver,
    search_path,
    store,
)
from gpipe_cli.config.targets import check_targets
from gpipe_cli.config.words import (
    CUSTOM,
    SCALE_KEY,
    SMALL,
    TEXT_KEYS,
    Request,
    named_packages,
    override_key,
    quote_override,
    sets_hydra,
    sets_key,
    to_hydra,
)
from gpipe_cli.config.yaml_files import WORD, ConfigFile, check_references, primary_name, read_config_file
from gpipe_cli.errors import ConfigError, or_list
from gpipe_cli.launch.rank_files import RankFiles, RankTask
from gpipe_cli.safe_files import remember
from gpipe_cli.schedule.orders import AUTO
from gpipe_cli.values import flatten

ALLOW_VARIABLE = "GPIPE_ALLOW"
EVAL_EVERY = (
    "eval_every works for one more release; eval.every=<steps> leaves out the evaluations after epochs"
)
SOURCES = ("run", "snapshot", "weights", "model", "model._target_")
"""Keys that say where a trained model comes from, or which model it is; otherwise model.path is its directory."""
UNPREPARED = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What both raise where they did not expect a value."""
NODES = {int: IntegerNode(), float: FloatNode(), bool: BooleanNode(), str: StringNode()}


@final
@dataclass(frozen=True)
class _Composed:
    tree: DictConfig
    choices: Mapping[str, Any]
    words: tuple[str, ...]
    file: ConfigFile
    notes: tuple[str, ...]


def compose(request: Request) -> Job:
    """Compose and check the only job of a command line, or one of a sweep."""
    composed = _compose(request)
    with composed.file.named_in_errors():
        settings = settings_of(composed.tree, request.command, request.words)
    if "eval=none" in composed.words and settings.eval.every is not None:
        every = f"eval.every={settings.eval.every}"
        raise ConfigError(f"{every}: needs evaluations, and eval=none leaves them out; remove one of them")
    overrides = (*composed.file.words, *composed.words)
    _check_plan_keys(settings, overrides)
    notes = [
        overridden_epochs(settings, overrides),
        EVAL_EVERY if sets_key(overrides, "eval_every") else None,
    ]
    return Job(
        request.command,
        overrides,
        request.line,
        composed.tree,
        _model_name(composed),
        settings,
        (*composed.notes, *filter(None, notes)),
        json=request.json,
        dry_run=request.dry_run,
        debug=request.debug,
    )


def job_of_rank(files: RankFiles, task: RankTask) -> Job:
    """The job of one rank, as its launcher describes it."""
    tree = OmegaConf.create(task.config)
    assert isinstance(tree, DictConfig), "the launcher wrote a mapping"
    overrides = tuple(task.job["overrides"])
    settings = settings_of(tree, task.command, overrides)
    if task.run_directory is not None:  # after a failure all ranks resume from the last snapshot
        assert isinstance(settings, TrainConfig), "only a training run has a directory"
        settings = replace(settings, resume="auto", run_dir=task.run_directory)
    rank = Rank(files, task.balance, task.order)
    return Job(task.command, **{**task.job, "overrides": overrides}, tree=tree, settings=settings, rank=rank)


def compose_tree(request: Request) -> DictConfig:
    """The composed tree, which may be an unfinished configuration."""
    return _compose(request).tree


def print_config(request: Request) -> None:
    """gpipe <command> --cfg job [--package P] [--resolve]; it may be an unfinished configuration."""
    composed, package = _compose(request), request.package
    shown: Any = composed.tree
    with composed.file.named_in_errors(), config_errors(request.command):
        with suppress(OmegaConfBaseException):  # a value or an environment variable may be missing
            typed(shown, request.command)
        if package not in (None, "_global_"):
            shown = OmegaConf.select(shown, str(package))
            if shown is None:
                raise ConfigError(f"--package {package}: no such part of the configuration")
        if not isinstance(shown, Container):
            sys.stdout.write(f"{shown}\n")
            return
        if request.resolve:
            OmegaConf.resolve(shown)
        header = f"# @package {package}\n" if package not in (None, "_global_") else ""
        sys.stdout.write(f"{header}{OmegaConf.to_yaml(shown)}")


def sweep_words(request: Request) -> dict[str, list[str]]:
    """Each word of the jobs, with those that it stands for: one for each value, or for each end of an interval."""
    own = [word for word in request.words if not sets_hydra(word)]
    searches = sets_key(request.words, "hydra/sweeper")
    with config_errors(request.command):
        parsed = OverridesParser.create().parse_overrides(list(map(quote_override, own)))
        pairs = zip(own, parsed, strict=True)
        return {word: _sweep_word(word, override, searches=searches) for word, override in pairs}


def _compose(request: Request) -> _Composed:
    with (
        prepared(request) as (primary, given, file, composing),
        config_errors(request.command),
        initialize(None, request.command, **VERSION),
    ):
        tree = hydra.compose(primary, given, return_hydra_config=True)
    choices = tree.hydra.runtime.choices
    plain = OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])
    OmegaConf.set_struct(plain, None)
    if packages := named_packages(request.words):
        plain.allow = list(dict.fromkeys([*plain.allow, *packages]))
        given = [*given, f"allow=[{','.join(plain.allow)}]"]
    _expand_home(plain)
    return _Composed(plain, choices, tuple(given), file, (*file.notes, *composing.notes))


def _expand_home(tree: DictConfig) -> None:
    """Let `~/` begin the home directory, as it does for a shell, which leaves it alone within a word and a file."""
    for key, value in flatten(OmegaConf.to_container(tree), inner=True):
        if isinstance(value, str) and f"{value}/".startswith("~/") and key not in TEXT_KEYS:
            OmegaConf.update(tree, key, os.path.expanduser(value))  # noqa: PTH111 - Path raises without a home


@contextmanager
def prepared(
    request: Request, config: HydraConf | None = None
) -> Iterator[tuple[str, list[str], ConfigFile, Composing]]:
    """Inside, Hydra composes the request from this primary configuration and these words.

    config: as for `search_path`.
    """
    command, words = request.command, request.words
    check_words(request)
    own = [word for word in words if not word.startswith(WORD) and not sets_hydra(word)]
    keys = {override_key(word) for word in own}
    if command == "generate" and "model.path" in keys and keys.isdisjoint(SOURCES):
        own = ["model=hf", *own]
    given = to_hydra(own, open_groups=COMPONENT_GROUPS if request.continues_run else ())
    options = {key: value for key, _, value in (word.partition("=") for word in given) if key in GROUPS}
    composing = Composing(None if request.config_dir is None else Path(request.config_dir), options)
    primary = request.config_name or command
    file = read_config_file(command, words, primary)
    with search_path(command, composing, config), file.named_in_errors():
        if file.path:
            primary = primary_name(file.path)
            node = OmegaConf.create(dict(file.primary))
            fit_components(node, file.path)
            store(primary, node)
            given = [*(file.recipe if not sets_key(given, "recipes") else ()), *given]
        yield primary, given, file, composing


def _model_name(composed: _Composed) -> str:
    """The option of the model, or the last part of its target."""
    choice = composed.choices.get("model")
    if choice not in (None, CUSTOM):
        return str(choice)
    tree: Any = OmegaConf.to_container(composed.tree)  # unresolved: a directory name must not reveal a secret
    return (
        composed.file.options.get("model")
        or str((tree.get("model") or {}).get("_target_", "model")).rpartition(".")[2]
    )


def settings_of(tree: DictConfig, command: str, words: Sequence[str]) -> CommandConfig:
    """The typed configuration: no key lost, none unknown, every value checked."""
    with config_errors(command):
        settings = typed(tree, command)
    if isinstance(settings, ModelConfig):
        settings = replace(settings, allow=_allowed(settings, words))
        components = {
            group: getattr(settings, group) for group in COMPONENT_GROUPS if hasattr(settings, group)
        }
        check_targets(components, settings.allow)
    check(settings)
    return settings


def typed(tree: DictConfig, command: str) -> CommandConfig:
    """The command's dataclass from a tree, which must have each of its keys and no other.

    A group of keys may lack some: a run of an earlier version has none that are newer.
    """
    _hide_environment_values()
    check_references(OmegaConf.to_container(tree))
    plain: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    check_numbers(plain)
    for removed in (name for name in SCHEMAS[command].__dataclass_fields__ if name not in plain):
        raise ConfigError(f"'{removed}' was removed, but it is required")
    settings = _filled(SCHEMAS[command], plain, command)
    assert isinstance(settings, CommandConfig)
    return settings


def _filled(kind: Any, plain: Mapping[str, Any], command: str, above: str = "") -> Any:
    """A class of the schema with these values; above: the path to its keys, `log.` for those of LogConfig."""
    hints, values = _type_hints(kind), {}
    for name, value in plain.items():
        key = f"{above}{name}"
        if name not in kind.__dataclass_fields__:
            raise ConfigError(f"unknown key '{key}'; {hint_for_unknown(key, command)}")
        if not is_dataclass(hints[name]):
            values[name] = _converted(value, hints[name], key)
        elif isinstance(value, Mapping):
            values[name] = _filled(hints[name], value, command, f"{key}.")
        else:
            raise ConfigError(f"{key}={value}: holds several keys; set one of them, {key}.<key>=...")
    return kind(**values)


_type_hints = cache(get_type_hints)


def _converted(value: Any, hint: Any, key: str) -> Any:
    """The value if it fits the type hint. A number may stand for text, and text, as the environment has, for one."""
    for kind in {*NODES} & {*union_members(hint)}:
        with suppress(ValidationError):
            value = NODES[kind].validate_and_convert(value)
    if problem := type_mismatch(value, hint):
        raise ConfigError(f"{key}={'null' if value is None else value}: {problem}")
    if isinstance(value, list) and (inner := get_args(hint)):
        return [_converted(member, inner[0], f"{key}[{index}]") for index, member in enumerate(value)]
    return value


@cache
def _hide_environment_values() -> None:
    """Keep the values of `${oc.env:NAME}`, which may be secrets, out of log files."""

    def resolve(name: str, *default: Any) -> Any:
        value = oc.env(name, *default)
        remember(name, value)
        return value

    register_resolver("oc.env", resolve)


def _allowed(settings: ModelConfig, words: Sequence[str]) -> list[str]:
    """The packages whose code may run: those that the command line or the environment names, and no file."""
    given = [word for word in words if override_key(word) == "allow"]
    if any("${" in word for word in given):
        raise ConfigError(
            f"{given[0]}: write out the names of the packages; a reference may change unnoticed"
        )
    environment = [name for name in os.environ.get(ALLOW_VARIABLE, "").split(",") if name]
    trusted = {*environment, *named_packages(words), *(settings.allow if given else ())}
    for package in (*settings.allow, *environment):
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", package):
            raise ConfigError(f"allow={settings.allow}: {package!r} is not a package name")
    if untrusted := [package for package in settings.allow if package not in trusted]:
        names = ",".join(untrusted)
        raise ConfigError(
            f"add 'allow=[{names}]' to the command line, or set {ALLOW_VARIABLE}={names}, if you trust this code; "
            "allow may only be given on the command line, not in a file"
        )
    return list(dict.fromkeys((*settings.allow, *environment)))


def _check_plan_keys(settings: CommandConfig, overrides: Sequence[str]) -> None:
    """Refuse limits of a search that does not take place."""
    flat = dict(flatten(asdict(settings)))
    searches = flat.get("plan.auto") or flat.get("schedule.name") == AUTO
    used = {"plan.verify_budget": (flat.get("verify"), "verify=true")}
    if settings.trains:
        used["plan.budget"] = (flat["plan.auto"], "plan=auto")
        used["plan.cache"] = (searches, "plan=auto or schedule=auto")
    for key, (is_used, needed) in used.items():
        if sets_key(overrides, key) and not is_used:
            raise ConfigError(f"{key}: has no effect without {needed}; remove it")


def overridden_epochs(settings: CommandConfig, overrides: Sequence[str]) -> str | None:
    """A line about `epochs` that have no effect, because a recipe or the run to resume has `steps`."""
    steps = settings.steps
    if (
        not settings.trains
        or steps is None
        or sets_key(overrides, "steps")
        or not sets_key(overrides, "epochs")
    ):
        return None
    return f"epochs has no effect, because a file sets steps={steps}, which overrides it; add steps=null"


def _sweep_word(word: str, override: Override, *, searches: bool) -> list[str]:
    """searches: whether the sweeper takes intervals."""
    key = override.get_key_element()
    value: Any = override.value()
    if isinstance(value, Glob):  # Hydra would look for options where it finds its own
        options = list_options(key)
        if not (values := value.filter([option.name for option in options])):
            raise ConfigError(f"{word}: no option of {key} has such a name")
    elif isinstance(value, IntervalSweep):
        if not searches:
            raise ConfigError(f"{word}: an interval needs hydra/sweeper=optuna, which searches in it")
        values = [str(value.start), str(value.end)]
    elif override.is_discrete_sweep():
        values = list(override.sweep_string_iterator())
    else:
        return [word]
    return [f"{key}={each}" for each in values]


@contextmanager
def config_errors(command: str) -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise about a configuration into a ConfigError of one line."""
    try:
        yield
    except MissingConfigException as error:
        raise ConfigError(_missing_option(error)) from error
    except OverrideParseException as error:
        key, _, value = str(error.override).partition("=")
        raise ConfigError(
            f"{error.override}: cannot be read; if the value is text, put it in quotes that the shell leaves alone: "
            f"\"{key}='{value}'\""
        ) from error
    except (HydraException, OmegaConfBaseException, *UNPREPARED) as error:
        raise ConfigError(_describe(error, command)) from error
    except RecursionError as error:
        raise ConfigError("configuration: references are nested too deeply, or contain themselves") from error


def _missing_option(error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file)
    group, _, option = missing.rpartition("/")
    available = [name for name in (error.options or []) if name != CUSTOM]
    if group == f"recipes/{SMALL}":
        small = or_list(option, [option.name for option in list_options(group)])
        return (
            f"recipe={option} {SCALE_KEY}={SMALL}: no recipe of that name has that scale, remove it; {small}"
        )
    if not group:
        return (
            f"--config-name {missing}: no such config; it is looked for in the folder given as --config-dir"
        )
    group_of_code, _, name = missing.partition("/")
    module, _, attribute = name.rpartition(".")
    is_file = attribute == "py"
    if group_of_code in COMPONENT_GROUPS and (is_file or (module and "/" not in name)):
        code = f"{name}:<function or class>" if is_file else f"{module}:{attribute}"
        return f"{group_of_code}={name}: no such option; code of your own is {group_of_code}={code}"
    wanted = f"{'recipe' if group == 'recipes' else group}={option}: no such option"
    if group in ("hydra/launcher", "hydra/sweeper"):
        wanted += "; pip install 'gpipe-cli[sweeps]' adds joblib, submitit and Optuna"
    return f"{wanted}; {or_list(option, available)}" if available else wanted


def _describe(error: Exception, command: str) -> str:
    # Hydra 1.4 raises some errors without a text, and their cause has it.
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    whole = " ".join(f"{error}".split()) or " ".join(f"{cause}".split())
    full_key = re.search(r"full_key: (\S+)", whole)
    key = getattr(cause, "full_key", None) or (full_key[1] if full_key else "")
    unknown = re.search(r"Key '(.+?)' (?:is )?not in|Could not override '(.+?)'", f"{cause} {whole}")
    if unknown:
        key = key or next(name for name in unknown.groups() if name)
        return f"unknown key '{key}'; {hint_for_unknown(key, command)}"
    if deleted := re.search(r"Could not delete from config.*'([^']+)'", whole):
        return f"~{deleted[1]}: there is no such key to remove; {hint_for_unknown(deleted[1], command)}"
    if sweep := re.search(
        r"(?:Ambiguous value for argument|Sweep parameters) '\+*(.+)' (?:1\.|requires)", whole
    ):
        return f"{sweep[1]}: several values need -m (a sweep), or [..] for a list"
    line = re.search(r"Error merging override (.+)", str(error))
    about = line[1].removeprefix("++") if line else key or "configuration"
    text = _first_line(cause)
    if isinstance(cause, MissingMandatoryValue):
        return f"{about}: must be given"
    if any(
        part in text for part in ("ListConfig", "container types", "invalid literal for int", "list indices")
    ):
        return f"{about}: expected a list in brackets, set as a whole"
    return f"{about}: {text[0].lower()}{text[1:]}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
