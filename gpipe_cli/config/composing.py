"""Hydra as gpipe uses it: it composes configurations from YAML folders, and nothing it composes configures Hydra.

Jobs are never run by Hydra, so its logging, environment variables, working directory, launcher, sweeper and
callbacks are out of reach. Files that try to set them are refused all the same, by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.version import setbase
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.locate import conf_dir, home
from gpipe_cli.config.schema import COMPONENT_GROUPS, SCHEMAS
from gpipe_cli.config.yaml_files import parse_yaml, read_config_text
from gpipe_cli.errors import ConfigError

__all__ = ["CUSTOM", "NODE", "check_choices", "composer", "refuse_hydra"]

CUSTOM = "custom"  # the empty option of an open group: nothing but what is given
NODE = "hydra"
CONFIG_DIR = "--config-dir"
CURE = "no file may configure Hydra; remove it"
CHOICES = {f"hydra/{group}": option for pair in HydraConf().defaults for group, option in pair.items()}
"""What Hydra chooses of its own groups when nothing is said."""
HYDRAS_OWN = frozenset({"hydra/config", *(f"{group}/{option}" for group, option in CHOICES.items())})


class YamlFolder(ConfigSource):
    """A folder of YAML files, each read within limits."""

    @staticmethod
    def scheme() -> str:
        return "gpipe"

    def load_config(self, config_path: str) -> ConfigResult:
        path = self.file(config_path)
        if not self.is_config(config_path):
            raise ConfigLoadError(f"{path}: not found")
        text = read_config_text(path)
        tree = parse_yaml(text, str(path))
        # Here already: Hydra follows the search path of a primary config before it composes anything.
        refuse_hydra(tree, str(path))
        header = self._get_header_dict(text)
        return ConfigResult(
            config=tree, path=f"{self.scheme()}://{self.path}", provider=self.provider, header=header
        )

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        return self._inside(config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        path = self.file(config_path)
        return os.path.lexists(path) and not path.is_dir()  # a dangling link too: it is an error, not absent

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        found: list[str] = []
        for path in self._inside(config_path).iterdir():
            self._list_add_result(found, str(Path(config_path) / path.name), path.name, results_filter)
        return sorted(set(found))

    def file(self, config_path: str) -> Path:
        return self._inside(self._normalize_file_name(config_path))

    def _inside(self, config_path: str) -> Path:
        if ".." in Path(config_path).parts or Path(config_path).is_absolute() or "\0" in config_path:
            raise ConfigError(f"{config_path}: leaves {self.path}; name an option below it")
        return Path(self.path) / config_path


class GuardedLoader(ConfigLoaderImpl):
    """Lets nothing but Hydra's own defaults contribute to the `hydra` node, whatever package a file is put into."""

    def _load_single_config(self, default: Any, repo: Any) -> ConfigResult:
        self._refuse_shadow(default.config_path, repo)
        result = super()._load_single_config(default, repo)
        own = default.config_path in HYDRAS_OWN and result.provider in ("hydra", "schema")
        if not own:
            refuse_hydra(result.config, default.config_path)
        return result

    @staticmethod
    def _refuse_shadow(config_path: str, repo: Any) -> None:
        """The first source wins: a file of the user's that has a name of ours would be ignored in silence."""
        sources = repo.get_sources()
        for own in sources:
            if own.provider != CONFIG_DIR or not own.is_config(config_path):
                continue
            holders = [source for source in sources if source.is_config(config_path)]
            if len({_identity(source, config_path) for source in holders}) > 1:
                path = own.file(config_path)
                raise ConfigError(f"{path}: gpipe has a config of that name; give yours another one")


def _identity(source: ConfigSource, config_path: str) -> Path | str:
    """The folder of the user may be the one of ours."""
    return source.file(config_path).resolve() if isinstance(source, YamlFolder) else source.provider


@contextmanager
def composer(command: str, config_dir: str | None = None) -> Iterator[Hydra]:
    """Hydra, which finds our configs, then recipes/, then the user's folder; an option of ours cannot be replaced."""
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    _register()
    setbase("1.3")
    GlobalHydra.instance().clear()
    path = create_config_search_path(f"gpipe://{conf_dir()}")
    schema = path.get_path().pop()  # Hydra wants it last
    path.append("recipes", f"gpipe://{home()}")
    if config_dir is not None:
        path.append(CONFIG_DIR, f"gpipe://{Path(config_dir).resolve()}")
    path.get_path().append(schema)
    hydra = Hydra(task_name=command, config_loader=GuardedLoader(path))
    GlobalHydra.instance().initialize(hydra)
    try:
        yield hydra
    finally:
        GlobalHydra.instance().clear()


def refuse_hydra(tree: Any, name: str) -> None:
    """name: of the file the tree comes from."""
    if isinstance(tree, DictConfig) and NODE in tree:
        raise ConfigError(f"{name}: sets {_first_key(tree)}: {CURE}")


def check_choices(choices: Mapping[str, Any]) -> None:
    """An option of Hydra's may also be taken away, which leaves nothing to find in the files that are loaded."""
    for group, option in choices.items():
        if group.startswith(f"{NODE}/") and option != CHOICES.get(group):
            raise ConfigError(f"{group}={option}: {CURE}")


def _register() -> None:
    """Tell Hydra of the schemas and of our way to read files."""
    for command, schema in SCHEMAS.items():
        ConfigStore.instance().store(f"{command}_schema", schema)
    for group in COMPONENT_GROUPS:
        ConfigStore.instance().store(group=group, name=CUSTOM, node={"_target_": "???"})
    Plugins.instance().register(YamlFolder)


def _first_key(tree: DictConfig) -> str:
    """The dotted name of the first key below `hydra`."""
    plain: Any = OmegaConf.to_container(tree)
    path, node = NODE, plain[NODE]
    while isinstance(node, dict) and node:
        key, node = next(iter(node.items()))
        path = f"{path}.{key}"
    return path
