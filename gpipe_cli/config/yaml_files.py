"""Every YAML file that gpipe reads: shipped options, recipes, --config-dir, config=FILE and a run's config.yaml.

Files may be hostile. gpipe reads regular files of bounded size and nesting, without YAML aliases; a file chooses
options of gpipe's own groups and sets keys, and it configures neither Hydra nor what code may run.

config=FILE is a whole run as one file of keys, or the config.yaml of an earlier run. It becomes a primary configuration
of Hydra, which begins with that of the command, chooses options and sets keys. Relative paths in it mean what they mean
on the command line: they start in the current folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, final

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe_cli.config.keys import check_option, chosen_options, groups_of
from gpipe_cli.config.saved_paths import use_found_paths
from gpipe_cli.config.schema import COMPONENT_GROUPS, GROUPS, NO_EFFECT, SCHEMAS, EvaluationConfig
from gpipe_cli.config.targets import MOVED, with_current_names
from gpipe_cli.config.words import override_key
from gpipe_cli.errors import ConfigError, did_you_mean
from gpipe_cli.safe_files import UnsafeFile, read_regular
from gpipe_cli.values import flatten

MAX_CONFIG_BYTES = 64 * 1024
MAX_REFERENCES = 24
"""A reference may name a text with references: if each names three, this many make a text 6,561 times as long."""
DEEPEST = 32
HYDRA_HINT = "no file may configure Hydra; give it on the command line"
ALLOW_HINT = "may only be given on the command line, not in a file; add it there if you trust the code"
_PACKAGE = re.compile(r"_global_(\.(?!hydra\b|allow\b)\w+)?")
_DEFAULT = re.compile(r"(?:(?:override|optional) +)*/?(?P<group>[\w/]+)(?:@(?P<package>[\w.]+))?")
_OPTION = re.compile(r"[\w.-]+(/[\w.-]+)*")
_Events = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser where PyYAML was built with it
WORD = "config="
FORBIDDEN = {
    "allow": ALLOW_HINT,
    "hydra": HYDRA_HINT,
    "defaults": "a file of keys has no list of defaults; choose an option by its group, as in model: resnet18",
}
RECIPES = "recipes"
OPTION = "option"
"""In the mapping of a group, the key that names the option."""
LAUNCH_KEYS = ("allow", "resume", "reset_optimizer", "run_dir")
"""Keys of one launch; another run does not take them over."""
DIVISION = ("balance", "schedule", "engine", "plan")
"""Groups that each command has its own default of: gpipe train balances by time, and gpipe plan searches."""
_KEY = re.compile(r"\+?[A-Za-z_][\w-]*(\.[\w-]+)*", re.ASCII)


def load_yaml(path: Path, *, base: Path | None = None) -> DictConfig | ListConfig:
    """The content of a file, which names targets as this version does.

    base: the run directory that the file belongs to; FileNotFoundError where it has none.
    """
    text = read_config_text(path, base=base)
    tree = parse_yaml(text, str(path))
    if any(name in text for name in MOVED):  # an earlier version saved it
        tree = OmegaConf.create(with_current_names(OmegaConf.to_container(tree)))
    return tree


def load_mapping(path: Path) -> dict[Any, Any]:
    """The keys and values of a file, with references as text."""
    plain = OmegaConf.to_container(load_yaml(path))
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: its top level must be a mapping of keys")
    return plain


def dump_mapping(plain: dict[str, Any]) -> str:
    """The text of a file that `load_mapping` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def read_config_text(path: Path, *, base: Path | None = None) -> str:
    """The whole file as text; a FIFO, a device or a file that is too large is refused without waiting for it."""
    try:
        return read_regular(path, MAX_CONFIG_BYTES, base=base).decode("utf-8-sig")
    except UnsafeFile as error:
        raise ConfigError(
            f"{path}: {error}; a configuration is a regular file of at most {MAX_CONFIG_BYTES // 1024} KiB"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name, or bytes that are not UTF-8
        if base is not None and isinstance(error, FileNotFoundError):
            raise
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def parse_yaml(text: str, name: str) -> DictConfig | ListConfig:
    """name: of the file, for messages."""
    try:
        _check_limits(text, name)
        return OmegaConf.create(text) if text.strip() else OmegaConf.create({})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        raise ConfigError(f"{name}{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{name}: cannot be read: {shorten(str(error), 200)}") from error
    except RecursionError as error:  # interpolations may be nested too
        raise ConfigError(f"{name}: is nested too deeply") from error


def _check_limits(text: str, name: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Events):
        line = event.start_mark.line + 1
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ConfigError(f"{name}:{line}: is nested more than {DEEPEST} levels deep")
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                f"{name}:{line}: *{event.anchor} is a YAML alias; repeat the value, or refer to a key by ${{key}}"
            )


def check_references(plain: Any) -> None:
    """Refuse an unresolved tree with so many references that resolving them could take hours."""
    count = sum(text.count("${") for text in _texts(plain))
    if count > MAX_REFERENCES:
        raise ConfigError(
            f"configuration: has {count} references ${{...}}; gpipe takes at most {MAX_REFERENCES}"
        )


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    members = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for member in members:
        yield from _texts(member)


def check_content(plain: Any, package: str | None, name: str) -> None:
    """Refuse a file that does more than choose options of gpipe's groups and set keys; name: of the file.

    package: where its header puts its keys. What a file may say is listed here, rather than what it may not.
    """
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{name}: its top level must be a mapping of keys")
    if package is not None and not _PACKAGE.fullmatch(package) and package not in ("_group_", *GROUPS):
        raise ConfigError(f"{name}: @package {package}: {_hydra_hint(package)}")
    for key in plain:
        if key == "allow":
            raise ConfigError(f"{name}: allow: {ALLOW_HINT}")
        if not isinstance(key, str) or not key.isidentifier() or key == "hydra":
            raise ConfigError(f"{name}: sets {key_path(plain, key)}: {_hydra_hint(key)}")
    defaults = plain.get("defaults") or []
    for entry in defaults if isinstance(defaults, list) else [defaults]:
        _check_default(entry, name)


def key_path(plain: Mapping[Any, Any], key: Any) -> str:
    """The dotted path to the first value below the key."""
    path, node = str(key), plain[key]
    while isinstance(node, dict) and node:
        inner, node = next(iter(node.items()))
        path = f"{path}.{inner}"
    return path


def _check_default(entry: Any, name: str) -> None:
    if isinstance(entry, str) and entry.removesuffix("_schema") in ("_self_", *SCHEMAS):
        return
    ((key, option),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else ((entry, ""),)
    match = _DEFAULT.fullmatch(key) if isinstance(key, str) else None
    group = "" if match is None else match["group"]
    package = None if match is None else match["package"]
    shown = f"{key}: {option}" if isinstance(entry, dict) else entry
    if group.partition("/")[0] not in (*GROUPS, "recipes") or package not in (None, f"_global_.{group}"):
        raise ConfigError(f"{name}: defaults: {shown}: {_hydra_hint(key)}")
    if option is not None and not (isinstance(option, str) and _OPTION.fullmatch(option or group)):
        raise ConfigError(f"{name}: defaults: {shown}: choose an option by its name")
    if ".." in str(option or ""):
        raise ConfigError(f"{name}: defaults: {shown}: leaves the folder; name an option below it")


def _hydra_hint(key: Any) -> str:
    if re.search(r"\bhydra\b", str(key)):
        return HYDRA_HINT
    return "a file may choose options of gpipe's groups and set keys; remove it"


@final
@dataclass(frozen=True)
class ConfigFile:
    """What config=FILE says; without the word it says nothing."""

    path: str = ""
    primary: Mapping[str, Any] = field(default_factory=dict)
    """The configuration that Hydra composes in place of the command's."""
    keys: tuple[str, ...] = ()
    """Every key that it sets, and every group of which it chooses an option."""
    words: tuple[str, ...] = ()
    """What the file gives, as the words of a command line would; for that of a run, what the run was given."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options that the run chose; its config.yaml has only what they contain."""
    recipe: Sequence[str] = ()
    """The word that chooses its recipe: Hydra 1.4 takes no option with a slash in a list of defaults."""
    notes: tuple[str, ...] = ()
    """What the command does not take from the file, in lines for the user."""

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Let an error about one of its keys begin with the name of the file."""
        try:
            yield
        except ConfigError as error:
            message = str(error).replace(f" in {primary_name(self.path)}.yaml", "")
            if not any(_is_about(message, key) for key in self.keys):
                raise
            raise ConfigError(f"{self.path}: {message}") from error


def primary_name(path: str) -> str:
    return f"config_{re.sub(r'[^A-Za-z0-9]', '_', path)}"


def read_config_file(command: str, words: Sequence[str], primary: str) -> ConfigFile:
    """The file that the words of a command line name; primary: the configuration that it begins with."""
    names = [word.removeprefix(WORD) for word in words if word.startswith(WORD)]
    if len(names) > 1:
        raise ConfigError(f"config: given {len(names)} times ({', '.join(names)}); give one file")
    if not names:
        return ConfigFile()
    (name,) = names
    path = _existing(name)
    plain, notes, options = load_mapping(path), [], {}
    given: tuple[str, ...] | None = None
    try:
        if is_saved(plain):
            plain = load_saved(path)
            given = recorded_words(path.parent)
            options = {
                group: option.name for group, option in chosen_options(saved_command(plain), given).items()
            }
            plain, left_out = _of_run(plain, command, given)
            if left_out:
                notes.append(
                    f"{name}: gpipe {command} leaves out what it does not use: {', '.join(left_out)}"
                )
        nested = _nested(plain)
        if any(override_key(word) == "epochs" for word in words):
            nested.pop("steps", None)  # it would override them
        options_of_file, keys = _lifted(nested, command)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    words_of_file = (
        *(f"{group}={option}" for group, option in options_of_file.items()),
        *(f"{key}={value}" for key, value in flatten(keys)),
    )
    if given is None:
        given = words_of_file
    choices = [{f"override /{group}": name} for group, name in options_of_file.items() if group != RECIPES]
    entries = [primary, *choices, "_self_"]
    return ConfigFile(
        name,
        {"defaults": entries, **keys},
        (*map(override_key, words_of_file), *(key for key in keys if key not in GROUPS)),
        tuple(word for word in given if override_key(word).partition(".")[0] in {*nested, RECIPES}),
        options,
        [f"{RECIPES}={options_of_file[RECIPES]}"] if RECIPES in options_of_file else [],
        tuple(notes),
    )


def load_saved(path: Path) -> dict[str, Any]:
    """The mapping in the config.yaml of a run, as this version reads it."""
    tree = OmegaConf.create(load_mapping(path))
    read_as_current(tree, path.parent)
    plain: Any = OmegaConf.to_container(tree)
    assert isinstance(plain, dict), "it was one"
    return plain


def recorded_words(run: Path) -> tuple[str, ...]:
    """The options and keys that a run was started with, from its overrides.yaml; none if it has no such file."""
    path = run / "overrides.yaml"
    words = OmegaConf.to_container(load_yaml(path)) if path.is_file() else []
    return tuple(word for word in words if isinstance(word, str)) if isinstance(words, list) else ()


def is_saved(plain: Mapping[Any, Any]) -> bool:
    """Whether it is the complete configuration of a run: `allow`, and every component with its `_target_`."""
    components = [value for key, value in plain.items() if key in COMPONENT_GROUPS]
    return (
        "allow" in plain
        and "model" in plain
        and all(isinstance(component, dict) and "_target_" in component for component in components)
    )


def read_as_current(saved: DictConfig, run: Path) -> None:
    """Remove what earlier versions saved and no command has any more, and use the paths that exist now."""
    if isinstance(plan := saved.get("plan"), MutableMapping):
        plan.pop("verify_budget", None)
    if (
        "early_stop" in saved and "eval" not in saved
    ):  # a run of an earlier version, which held out other samples
        saved.eval = asdict(EvaluationConfig())
        saved.setdefault("data", {}).setdefault("stratify", False)
    use_found_paths(saved, run)


def saved_command(saved: Mapping[str, Any]) -> str:
    """The command that saved it."""
    return "profile" if "timeline" in saved else "train"


def _of_run(saved: Mapping[str, Any], command: str, given: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What the command takes of a saved configuration, and the keys that it does not have."""
    source = saved_command(saved)
    # The keys that mean the same to both commands are those of the classes that both derive from.
    classes = set(SCHEMAS[source].__mro__) & set(SCHEMAS[command].__mro__)
    shared = {each.name for cls in classes if is_dataclass(cls) for each in fields(cls)}
    shared -= set(NO_EFFECT.get(command, ()))
    if not issubclass(SCHEMAS[command], SCHEMAS[source]):
        chosen = {override_key(word).partition(".")[0] for word in given}
        shared -= {group for group in DIVISION if group not in chosen}
    everywhere = {each.name for schema in SCHEMAS.values() for each in fields(schema)}
    taken = {key: value for key, value in saved.items() if key in shared or key not in everywhere}
    left_out = [key for key in saved if key in everywhere and key not in (*shared, *LAUNCH_KEYS)]
    return {key: value for key, value in taken.items() if key not in LAUNCH_KEYS}, left_out


def _nested(plain: Mapping[Any, Any]) -> dict[str, Any]:
    """Put `optimizer.lr: 0.1` where `optimizer: {lr: 0.1}` would be, and `model: gpt` for `{model: {option: gpt}}`."""
    nested: Any = OmegaConf.create({})
    given: set[str] = set()
    for key, value in _of_recipe(plain).items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigError(f"{key!r} is not the name of a key")
        path = key.removeprefix("+")
        if path in (*GROUPS, "recipe") and not isinstance(value, dict):
            path = f"{path}.{OPTION}"
        paths = {name for name, _ in flatten({path: value})}
        if twice := given & paths:
            raise ConfigError(f"{min(twice)}: given twice")
        given |= paths
        OmegaConf.update(nested, path, value, merge=True, force_add=True)
    container: Any = OmegaConf.to_container(nested)
    return dict(container)


def _of_recipe(plain: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The options that a copied recipe has in its list of defaults, as keys."""
    entries = plain.get("defaults")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return plain
    chosen = {str(key).removeprefix("override /"): name for entry in entries for key, name in entry.items()}
    if not chosen or not chosen.keys() <= {*GROUPS}:
        return plain
    rest = {key: value for key, value in plain.items() if key != "defaults"}
    return {f"{group}.{OPTION}": name for group, name in chosen.items()} | rest


def _lifted(nested: Mapping[str, Any], command: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The option that the file chooses in each group, and the keys that it sets."""
    options: dict[str, str] = {}
    keys: dict[str, Any] = {}
    for name, value in nested.items():
        if name in FORBIDDEN:
            raise ConfigError(f"{name}: {FORBIDDEN[name]}")
        if name not in (*GROUPS, "recipe"):
            keys[name] = value
            continue
        mapping = {str(key).removeprefix("+"): member for key, member in value.items()}
        # Some options have a key `name`, as schedules do; it names the option only where nothing else does.
        key = OPTION if {OPTION, "_target_"} & mapping.keys() or name == "schedule" else "name"
        scale = mapping.pop("scale", None) if name == "recipe" else None
        if key in mapping:
            if name in GROUPS and name not in groups_of(command):
                raise ConfigError(f"{name}: holds several keys; set one of them, as in {name}.<key>: ...")
            option = mapping.pop(key)
            check_option(name, option, f"{name}: {json.dumps(option)}")
            folder = f"{scale}/" if scale not in (None, "full") else ""
            options[RECIPES if name == "recipe" else name] = f"{folder}{option}"
        for inner in mapping:
            if not _KEY.fullmatch(inner) or name == "recipe":
                raise ConfigError(f"{name}: {inner!r} is not the name of a key")
        if mapping:
            keys[name] = mapping
    return options, keys


def _existing(name: str) -> Path:
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path raises without a home
    if not name or "\0" in name:
        raise ConfigError("config: give config=<file>")
    if path.is_dir():
        saved = path / "config.yaml"
        hint = f"give config={saved}" if saved.is_file() else "give a file in it"
        raise ConfigError(f"config={name}: is a directory; {hint}")
    if not path.exists():
        siblings = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        suggestion = did_you_mean(path.name, sorted(siblings))
        raise ConfigError(f"config={name}: no such file{f'; {suggestion}' if suggestion else ''}")
    return path


def _is_about(message: str, key: str) -> bool:
    """Whether an error message begins with the key; that of an option is not about the keys below it."""
    end = r"(?![\w.])" if key in GROUPS else r"(?!\w)"
    return re.match(rf"(unknown key '|add 'allow=[^;]*; )?\+*{re.escape(key)}{end}", message) is not None
