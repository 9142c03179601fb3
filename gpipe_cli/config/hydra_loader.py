"""Hydra as gpipe uses it: it composes configurations from folders of YAML, and no file can configure Hydra itself.

gpipe runs its jobs itself, so Hydra's logging, environment variables, working directory, launchers, sweepers and
callbacks never take effect. A file that tries to set them is rejected by name all the same.
"""

from __future__ import annotations

import copy
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.conf import HydraConf
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.version import setbase
from omegaconf import Container, DictConfig, OmegaConf, open_dict

from gpipe_cli.config.options import conf_dir, list_options, resources_dir
from gpipe_cli.config.overrides import sets_key
from gpipe_cli.config.schema import COMPONENT_GROUPS, SCHEMAS
from gpipe_cli.config.yaml_files import parse_yaml, read_config_text
from gpipe_cli.errors import ConfigError

CUSTOM = "custom"
"""The empty option of a component group, whose `_target_` is given instead."""
HYDRA_NODE = "hydra"
CONFIG_DIR = "--config-dir"
CURE = "no file may configure Hydra; remove it"
DEFAULT_CHOICES = {
    f"hydra/{group}": option for pair in HydraConf().defaults for group, option in pair.items()
}
HYDRA_CONFIGS = frozenset(
    {"hydra/config", *(f"{group}/{option}" for group, option in DEFAULT_CHOICES.items())}
)
KEPT_KEYS = {"optimizer": ("lr",)}
"""Keys that a component has whatever its `_target_`. The others may mean something else to another one, as
weight_decay does to Adam, so they are left out."""


class YamlFolder(ConfigSource):
    """A folder of YAML files, each read within the limits of `yaml_files`."""

    @staticmethod
    def scheme() -> str:
        return "gpipe"

    def load_config(self, config_path: str) -> ConfigResult:
        path = self.file(config_path)
        if not self.is_config(config_path):
            raise ConfigLoadError(f"{path}: not found")
        text = read_config_text(path)
        tree = parse_yaml(text, str(path))
        # As early as here: Hydra follows the search path of a primary config before it composes anything.
        reject_hydra_keys(tree, str(path))
        header = self._get_header_dict(text)
        return ConfigResult(
            config=tree, path=f"{self.scheme()}://{self.path}", provider=self.provider, header=header
        )

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        if not config_path:
            return Path(self.path).is_dir()
        # A folder without YAML files is no group: in an installed package, recipes/ lies beside folders of code, and
        # gpipe_cli/run must not turn the key `run` into a group.
        return any(self._inside(config_path).glob("*.yaml"))

    def is_config(self, config_path: str) -> bool:
        path = self.file(config_path)
        return (
            os.path.lexists(path) and not path.is_dir()
        )  # a dangling link is an error, not a missing option

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names: list[str] = []
        for path in self._inside(config_path).iterdir():
            self._list_add_result(names, str(Path(config_path) / path.name), path.name, results_filter)
        return sorted(set(names))

    def file(self, config_path: str) -> Path:
        return self._inside(self._normalize_file_name(config_path))

    def _inside(self, config_path: str) -> Path:
        if ".." in Path(config_path).parts or Path(config_path).is_absolute() or "\0" in config_path:
            raise ConfigError(f"{config_path}: leaves {self.path}; name an option below it")
        return Path(self.path) / config_path


class SharedSources(ConfigRepository):
    """A repository whose copies have the same sources: copying Hydra's store would take a sixth of a composition."""

    def __deepcopy__(self, memo: object) -> SharedSources:
        # A copy that looks in other folders replaces its list of sources, and sources give away copies only.
        return copy.copy(self)


class GuardedLoader(ConfigLoaderImpl):
    """Rejects files that configure Hydra, and lets a new `_target_` replace a component instead of merging into it."""

    open_groups: frozenset[str] = frozenset()
    """Groups that accept keys which their option does not list."""
    given_targets: frozenset[str] = frozenset()
    """Groups whose `_target_` the command line names; the keys of their option are dropped."""
    replaced_groups: frozenset[str] = frozenset()
    """After composition: groups whose option was replaced by another `_target_`."""
    _loaded: Mapping[int, ConfigResult] = {}

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = SharedSources(config_search_path)

    def compose_without_hydra(
        self, config_name: str, overrides: Sequence[str]
    ) -> tuple[DictConfig, Mapping[str, Any]]:
        """The configuration that `load_configuration` composes, and the option chosen in each group.

        Without the node in which Hydra describes itself: it takes a quarter of the time, and no job uses it.
        """
        parsed, repo = self._parse_overrides_and_create_caching_repo(config_name, list(overrides))
        for path in HYDRA_CONFIGS:
            self._reject_shadowing(path, repo)
        defaults = create_defaults_list(
            repo=repo, config_name=config_name, overrides_list=parsed, prepend_hydra=False, skip_missing=False
        )
        tree = self._compose_config_from_defaults_list(defaults=defaults.defaults, repo=repo)
        OmegaConf.set_struct(tree, True)
        for override in defaults.config_overrides:
            try:
                self._apply_overrides_to_config([override], tree)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{override.input_line}: {_list_above(override.key_or_group, tree)}"
                ) from error
        return tree, defaults.overrides.known_choices

    def _load_single_config(self, default: Any, repo: Any) -> ConfigResult:
        if id(default) in self._loaded:
            return self._loaded[id(default)]
        self._reject_shadowing(default.config_path, repo)
        result = super()._load_single_config(default, repo)
        is_hydras = default.config_path in HYDRA_CONFIGS and result.provider in ("hydra", "schema")
        if not is_hydras:
            reject_hydra_keys(result.config, default.config_path)
        return result

    def _compose_config_from_defaults_list(self, defaults: Any, repo: Any) -> DictConfig:
        results = {id(default): self._load_single_config(default, repo) for default in defaults}
        self.replaced_groups = frozenset(
            group for group in COMPONENT_GROUPS if self._drop_replaced(group, list(results.values()))
        )
        self._loaded = results
        try:
            tree: DictConfig = super()._compose_config_from_defaults_list(defaults, repo)
        finally:
            self._loaded = {}
        for group in self.open_groups | self.replaced_groups:
            if isinstance(tree.get(group), DictConfig):
                OmegaConf.set_struct(tree[group], False)
        return tree

    def _drop_replaced(self, group: str, results: list[ConfigResult]) -> bool:
        """Remove the group's keys from every config whose `_target_` a later config, or the command line, replaces."""
        targets = [(result.config, _raw_target(result.config, group)) for result in results]
        named = [(config, target) for config, target in targets if target not in (None, "???")]
        last = None if group in self.given_targets or not named else named[-1][1]
        replaced = [config for config, target in named if target != last]
        for config in replaced:
            plain: Any = OmegaConf.to_container(config[group])
            with open_dict(config):
                config[group] = {key: plain[key] for key in KEPT_KEYS.get(group, ()) if key in plain}
        return group in self.given_targets or bool(replaced)

    @staticmethod
    def _reject_shadowing(config_path: str, repo: Any) -> None:
        """Reject a user's file with the name of one of ours: the first source wins, so Hydra would ignore the file."""
        sources = repo.get_sources()
        for user_source in sources:
            if user_source.provider != CONFIG_DIR or not user_source.is_config(config_path):
                continue
            # The user's folder may be one of ours, in which case both names mean the same file.
            files = {
                source.file(config_path).resolve() if isinstance(source, YamlFolder) else source.provider
                for source in sources
                if source.is_config(config_path)
            }
            if len(files) > 1:
                path = user_source.file(config_path)
                raise ConfigError(f"{path}: gpipe has a config of this name; rename yours")


def _list_above(key: str, tree: DictConfig) -> str:
    """What to do about a key below a list, where OmegaConf looks for an index."""
    parts = key.split(".")
    above = [".".join(parts[:count]) for count in range(1, len(parts))]
    found = next((name for name in above if OmegaConf.is_list(OmegaConf.select(tree, name))), None)
    return f"{found} is a list; set it as a whole, {found}=[...]" if found else "cannot be set"


def _raw_target(config: Any, group: str) -> Any:
    """`<group>._target_` as the file has it: a reference in it is not resolved."""
    if not isinstance(config, DictConfig) or group not in config or OmegaConf.is_interpolation(config, group):
        return None
    node = config.get(group)
    plain = OmegaConf.to_container(node) if isinstance(node, DictConfig) else None
    return plain.get("_target_") if isinstance(plain, dict) else None


@cache
def _register_with_hydra() -> None:
    """Once per process: what Hydra keeps in its singletons, which `GlobalHydra.clear` leaves as they are."""
    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(f"{name}_schema", schema)
    for group in COMPONENT_GROUPS:
        ConfigStore.instance().store(group=group, name=CUSTOM, node={"_target_": "???"})
    Plugins.instance().register(YamlFolder)
    setbase("1.3")


@contextmanager
def open_hydra(command: str, config_dir: str | None = None) -> Iterator[Hydra]:
    """Hydra, which searches conf/, then recipes/, then the user's folder; a shipped option cannot be replaced."""
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    _register_with_hydra()
    GlobalHydra.instance().clear()
    path = create_config_search_path(f"gpipe://{conf_dir()}")
    schemas = path.get_path().pop()  # Hydra wants its structured configs last
    path.append("recipes", f"gpipe://{resources_dir()}")
    if config_dir is not None:
        path.append(CONFIG_DIR, f"gpipe://{Path(config_dir).resolve()}")
    path.get_path().append(schemas)
    hydra = Hydra(task_name=command, config_loader=GuardedLoader(path))
    GlobalHydra.instance().initialize(hydra)
    try:
        yield hydra
    finally:
        GlobalHydra.instance().clear()


def reject_hydra_keys(tree: Any, name: str) -> None:
    """name: the file that the tree comes from."""
    if not isinstance(tree, DictConfig) or HYDRA_NODE not in tree:
        return
    plain: Any = OmegaConf.to_container(tree)
    path, node = HYDRA_NODE, plain[HYDRA_NODE]
    while isinstance(node, dict) and node:
        key, node = next(iter(node.items()))
        path = f"{path}.{key}"
    raise ConfigError(f"{name}: sets {path}: {CURE}")


def check_hydra_choices(choices: Mapping[str, Any]) -> None:
    """Reject a changed option of Hydra's own groups: an option set to null leaves no trace in the loaded files."""
    for group, option in choices.items():
        if group.startswith(f"{HYDRA_NODE}/") and option != DEFAULT_CHOICES.get(group):
            raise ConfigError(f"{group}={option}: {CURE}")


def print_config(tree: DictConfig, part: str, package: str | None, *, resolve: bool) -> None:
    """gpipe <command> --cfg job|hydra|all [--package P] [--resolve]. The tree contains the `hydra` node."""
    HydraConfig.instance().set_config(tree)  # resolves ${hydra:...}
    names = [str(key) for key in tree]
    keys = {"job": [name for name in names if name != HYDRA_NODE], "hydra": [HYDRA_NODE], "all": names}
    shown: Any = OmegaConf.masked_copy(tree, keys[part])
    OmegaConf.set_readonly(shown, False)
    if package not in (None, "_global_"):
        shown = OmegaConf.select(shown, str(package))
        if shown is None:
            raise ConfigError(f"--package {package}: no such part of the configuration")
        if isinstance(shown, Container):
            sys.stdout.write(f"# @package {package}\n")
    if not isinstance(shown, Container):
        sys.stdout.write(f"{shown}\n")
        return
    if resolve:
        OmegaConf.resolve(shown)
    sys.stdout.write(OmegaConf.to_yaml(shown))


def print_info(hydra: Hydra, topic: str | None, config_name: str, overrides: list[str]) -> None:
    """gpipe <command> --info [topic], or --hydra-help if there is no topic: Hydra's own answers."""
    if topic is None:
        hydra.hydra_help(config_name, get_args_parser(), Namespace(overrides=[]))
    else:
        hydra.show_info(topic, config_name=config_name, overrides=overrides)


def notes_on_replaced(
    tree: Mapping[str, Any], choices: Mapping[str, Any], overrides: Sequence[str]
) -> Iterator[str]:
    """A line for each replaced option of which something is kept though nobody gave it: that, and what is left out.

    choices: the option of each group before it was replaced.
    """
    for group, kept in KEPT_KEYS.items():
        node, choice = tree.get(group) or {}, choices.get(group)
        for option in list_options(group):
            if option.name != choice or option.target == node.get("_target_"):
                continue
            others = [key for key in option.keys if not sets_key(overrides, f"{group}.{key}")]
            values = ", ".join(f"{key}={node.get(key)}" for key in others if key in kept)
            left_out = ", ".join(key for key in others if key not in kept)
            if values and sets_key(overrides, f"{group}._target_"):
                yield (
                    f"{group}._target_={node.get('_target_')}: keeps {values} of {group}={choice} and leaves out "
                    f"its {left_out}; give those that you want"
                )
