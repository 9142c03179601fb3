"""Where Hydra finds gpipe's files: conf/, recipes/ and the user's folder, each read and checked by `files`.

Hydra knows two plugins of gpipe: a source that reads folders, and one that adds these folders to the search path while
gpipe composes. A shipped option cannot be replaced: Hydra takes the first file of a name, and gpipe refuses a second.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, final

import hydra
from hydra.conf import HydraConf
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.keys import conf_dir, list_options, resources_dir
from gpipe_cli.config.schema import COMPONENT_GROUPS, GROUPS, SCHEMAS
from gpipe_cli.config.words import CUSTOM
from gpipe_cli.config.yaml_files import check_content, parse_yaml, read_config_text
from gpipe_cli.errors import ConfigError

CONFIG_DIR = "--config-dir"
IS_1_4 = not hydra.__version__.startswith("1.3.")
VERSION: dict[str, Any] = {} if IS_1_4 else {"version_base": "1.3"}
"""Hydra 1.3 wants to be told which behaviour to have, and 1.4 has one."""
REPLACING: dict[str, Any] = {"replace": True} if IS_1_4 else {}
EMPTY_OPTION = {"_target_": "???"}
SINGLE_JOB = HydraConf(defaults=[])
_stored: dict[tuple[str, ...], Any] = {}


@final
@dataclass
class Composing:
    """A composition that is open: what its sources need to know, and what they have to say."""

    config_dir: Path | None
    options: Mapping[str, str]
    """The options that the command line chooses; CUSTOM where it names a `_target_`."""
    notes: list[str] = field(default_factory=list)
    """What the command line replaces in files, in lines for the user."""


_open: list[Composing] = []
"""Empty unless gpipe composes: another Hydra application may import gpipe, and its search path stays as it is."""


@contextmanager
def search_path(command: str, composing: Composing, config: HydraConf | None = None) -> Iterator[None]:
    """Inside, Hydra finds gpipe's configurations.

    config: what Hydra knows of itself; by default nothing, which halves the time it takes.
    """
    check_shadowing(composing.config_dir)
    _register_plugins()
    outer = GlobalHydra.instance().hydra  # of the sweep that this job belongs to
    outer_config = None if outer is None else ConfigStore.instance().load("hydra/config.yaml").node
    GlobalHydra.instance().clear()
    for base, schema in SCHEMAS.items():
        if issubclass(SCHEMAS[command], schema):  # gpipe launch-script begins with the files of gpipe train
            store(f"{base}_schema", _defaults(command))
    store("config", SINGLE_JOB if config is None else config, group="hydra")
    _open.append(composing)
    try:
        yield
    finally:
        _open.pop()
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().initialize(outer)
            store("config", outer_config, group="hydra")


@cache
def _defaults(command: str) -> DictConfig:
    """The keys of the command. Hydra judges no value: `compose` does, when files and words have set all of them."""
    return OmegaConf.create(asdict(SCHEMAS[command]()))


def store(name: str, node: Any, **place: Any) -> None:
    """Give Hydra a configuration that is in no file; what it has already is not built again."""
    if _stored.get((name, *place.values())) is not node:
        ConfigStore.instance().store(name, node, **place, **REPLACING)
        _stored[(name, *place.values())] = node


def register_resolver(name: str, resolve: Callable[..., Any]) -> None:
    # OmegaConf 2.4, which Hydra 1.4 needs, has a new name for it and warns of the old one.
    register: Any = OmegaConf.register_resolver if IS_1_4 else OmegaConf.register_new_resolver
    register(name, resolve, replace=True)


def _register_plugins() -> None:
    # Each time: a launcher's worker gets the plugins of the process that started it anew with every job.
    Plugins.instance().register(YamlFolder)
    Plugins.instance().register(GpipeSearchPath)


class GpipeSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for composing in _open[-1:]:
            # Hydra itself adds the package of the function that it runs, whose files nobody would check.
            search_path.get_path()[:] = [
                entry for entry in search_path.get_path() if entry.provider != "main"
            ]
            search_path.append("gpipe", f"gpipe://{conf_dir()}")
            search_path.append("recipes", f"gpipe://{resources_dir()}")
            if composing.config_dir is not None:
                search_path.append(CONFIG_DIR, f"gpipe://{composing.config_dir.resolve()}")


class YamlFolder(ConfigSource):
    """A folder of YAML files, each read within the limits of `files`."""

    @staticmethod
    def scheme() -> str:
        return "gpipe"

    def __deepcopy__(self, memo: object) -> YamlFolder:
        return self  # Hydra copies its sources for every composition, and this one never changes

    def load_config(self, config_path: str) -> ConfigResult:
        if self._is_empty_option(config_path):
            # A component of somebody else has the keys that it is given, whatever they are.
            tree = OmegaConf.create(EMPTY_OPTION, flags={"struct": False})
            return ConfigResult(
                provider=self.provider, path=self.full_path(), config=tree, header={"package": None}
            )
        path = self._file(config_path)
        if not self.is_config(config_path):
            raise ConfigLoadError(f"{path}: not found")
        text = read_config_text(path) if self.provider == CONFIG_DIR else path.read_text(encoding="utf-8")
        header = self._get_header_dict(text)
        loaded = copy.deepcopy(_parsed(text, str(path)))
        package = header.get("package")
        if self.provider == CONFIG_DIR:
            check_content(OmegaConf.to_container(loaded), package, str(path))
        if package == "_global_" or "/" not in config_path:
            assert isinstance(loaded, DictConfig), "it is a mapping"
            fit_components(loaded, str(path))
        return ConfigResult(provider=self.provider, path=self.full_path(), config=loaded, header=header)

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        if not config_path:
            return self.available()
        # A folder without YAML files is no group: in an installed package, recipes/ lies beside folders of code, and
        # gpipe_cli/runs must not turn a key `runs` into a group.
        return any(self._inside(config_path).glob("*.yaml"))

    def is_config(self, config_path: str) -> bool:
        path = self._file(config_path)
        # A dangling link is an error, not a missing option.
        return self._is_empty_option(config_path) or (os.path.lexists(path) and not path.is_dir())

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names: list[str] = []
        for path in self._inside(config_path).iterdir():
            self._list_add_result(names, str(Path(config_path) / path.name), path.name, results_filter)
        return sorted(set(names))

    def _is_empty_option(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return self.provider == "gpipe" and name == CUSTOM and group in COMPONENT_GROUPS

    def _file(self, config_path: str) -> Path:
        return self._inside(self._normalize_file_name(config_path))

    def _inside(self, config_path: str) -> Path:
        if ".." in Path(config_path).parts or Path(config_path).is_absolute() or "\0" in config_path:
            raise ConfigError(f"{config_path}: leaves {self.path}; name an option below it")
        return Path(self.path) / config_path


@cache
def _parsed(text: str, name: str) -> Any:
    return parse_yaml(text, name)


def fit_components(tree: DictConfig, name: str) -> None:
    """Let a file of keys replace components, and the command line replace those of the file; name: of the file.

    A component with a `_target_` of its own starts from the empty option: merged into another option, it would get
    keys that mean nothing to it. The same goes for keys of a component that the command line replaces.
    """
    plain: Any = OmegaConf.to_container(tree)
    entries = plain.get("defaults") or []
    chosen = {
        str(key).rpartition("/")[2].partition("@")[0]: option
        for entry in entries
        if isinstance(entry, dict)
        for key, option in entry.items()
    }
    for group in GROUPS:
        node = plain.get(group)
        keys = node if isinstance(node, dict) else {}
        option = CUSTOM if "_target_" in keys else chosen.get(group)
        if option == CUSTOM:
            entries = [entry for entry in entries if entry != {f"override /{group}": chosen.get(group)}]
            at = entries.index("_self_") if "_self_" in entries else len(entries)
            entries.insert(at, {f"override /{group}": CUSTOM})
        given = _open[-1].options.get(group)
        if given is None or not keys or (given == option and given != CUSTOM):
            continue
        kept = {} if option is not None or given == CUSTOM else _shared(keys, group, given)
        if left_out := [f"{group}.{key}" for key in keys if key not in kept and key != "_target_"]:
            word = f"{group}={given}" if given != CUSTOM else f"{group}._target_"
            _open[-1].notes.append(f"{name}: {word} replaces its {', '.join(left_out)}")
        tree[group] = kept
    tree["defaults"] = entries


def _shared(keys: Mapping[str, Any], group: str, given: str) -> dict[str, Any]:
    """The keys that the given option has too; all of them if it is not one of ours."""
    for option in list_options(group):
        if option.name == given:
            names = {key.partition(".")[0] for key in option.keys}
            return {key: value for key, value in keys.items() if key in names}
    return dict(keys)


def check_shadowing(config_dir: Path | None) -> None:
    """Refuse a user's file with the name of one of ours: the first source wins, so Hydra would ignore the file."""
    if config_dir is None:
        return
    if not config_dir.is_dir():
        raise ConfigError(f"{CONFIG_DIR} {config_dir}: no such folder")
    if config_dir.resolve() in (conf_dir(), resources_dir()):
        return
    ours = {f"{name}{kind}.yaml" for name in SCHEMAS for kind in ("", "_schema")} | {"hydra"}
    for group in (*GROUPS, "recipes", "recipes/small"):
        ours |= {f"{group}/{option.name}.yaml" for option in list_options(group)} | {f"{group}/{CUSTOM}.yaml"}
    for name in sorted(ours):
        if os.path.lexists(config_dir / name):
            raise ConfigError(f"{config_dir / name}: gpipe has a config of this name; rename yours")
