"""What a config may name in `_target_`, and the one function that turns such a node into an object.

A config is data, perhaps somebody else's. Every `_target_` of the tree is judged by its name before anything is
imported, and what it stands for is judged again: `admitted` says what a group takes. Arguments that would make
torchvision download are refused, and no model opens a connection while it is built.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpipe_cli.config.admitted import admits_name, admits_object, described, own_targets
from gpipe_cli.config.kinds import mismatch
from gpipe_cli.config.offline import offline
from gpipe_cli.config.schema import COMPONENT_GROUPS
from gpipe_cli.config.suggest import did_you_mean, or_list
from gpipe_cli.errors import ConfigError, DataError, GpipeError

BUILT_OFFLINE = ("model", "loss", "optimizer")
SHIPPED = ("gpipe_cli", "torch", "torchvision")
_DOWNLOADS = re.compile(r"weights|pretrained|download$")
_NAME = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+")  # dotted, no segment private


def check_targets(tree: Mapping[str, Any], allow: Sequence[str] = ()) -> None:
    """Refuse a tree that names anything outside the allow-lists; imports nothing."""
    for key, node in tree.items():
        for path, target in _targets(key, node):
            _check_name(path, target, key, allow)


def instantiate(node: Mapping[str, Any], group: str, allow: Sequence[str] = (), **offered: Any) -> Any:
    """The object a component's node describes.

    `offered` are arguments that no config can give (a module, parameters): the target gets those it names.
    """
    make = bind(node, group, allow, offered)
    try:
        with _connected_or_not(node, group, allow):
            return make()
    except GpipeError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{group}: {node['_target_']} does not take these values: {error}") from error


def bind(
    node: Mapping[str, Any],
    group: str,
    allow: Sequence[str] = (),
    offered: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[], Any]:
    """The node's target with all its arguments, checked against its signature but not yet called."""
    return _bind(node, group, group, allow, offered)


def accepted(node: Mapping[str, Any], group: str, allow: Sequence[str] = ()) -> frozenset[str]:
    """The names of the arguments the node's target takes."""
    _check_name(f"{group}._target_", node.get("_target_"), group, allow)
    return frozenset(inspect.signature(_resolve(node["_target_"], group, allow)).parameters)


def _bind(
    node: Mapping[str, Any], path: str, group: str, allow: Sequence[str], offered: Mapping[str, Any]
) -> Callable[[], Any]:
    target = node.get("_target_")
    _check_name(f"{path}._target_", target, group, allow)
    assert isinstance(target, str)
    function = _resolve(target, group, allow)
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    _check_arguments(function, target, path, arguments, offered)
    makers = {key: _maker(value, f"{path}.{key}", group, allow) for key, value in arguments.items()}
    named = inspect.signature(function).parameters
    runtime = {name: value for name, value in offered.items() if name in named}

    def make() -> Any:
        built = {key: make_argument() for key, make_argument in makers.items()}
        with _as_config_error(function, f"{path}: {target}"):
            return function(**built, **runtime)

    return make


def _connected_or_not(
    node: Mapping[str, Any], group: str, allow: Sequence[str]
) -> AbstractContextManager[None]:
    """Data and loggers of your own may have to fetch something; no trust makes a model do so."""
    target = str(node["_target_"])
    if group in BUILT_OFFLINE or (group == "data" and not _is_trusted(target, allow)):
        return offline(f"{group}._target_={target}")
    return nullcontext()


@contextmanager
def _as_config_error(function: Callable[..., Any], what: str) -> Iterator[None]:
    """Whatever torch and torchvision raise over arguments, and that is nearly anything, is about the configuration."""
    try:
        yield
    except (GpipeError, MemoryError):
        raise
    except Exception as error:
        if function.__module__.partition(".")[0] not in ("torch", "torchvision") or "alloc" in str(error):
            raise
        if isinstance(error, OSError):
            raise DataError(f"{what}: {error}") from error
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{what} does not take these values: {reason}") from error


def _maker(value: Any, path: str, group: str, allow: Sequence[str]) -> Callable[[], Any]:
    """What gives an argument: itself, or what the components in it describe."""
    if isinstance(value, Mapping) and "_target_" in value:
        return _bind(value, path, group, allow, {})
    if isinstance(value, Mapping):
        members = {key: _maker(one, f"{path}.{key}", group, allow) for key, one in value.items()}
        return lambda: {key: make() for key, make in members.items()}
    if isinstance(value, list | tuple):
        items = [_maker(one, f"{path}[{index}]", group, allow) for index, one in enumerate(value)]
        return lambda: [make() for make in items]
    return lambda: value


def _targets(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Every `_target_` at or below the node, with its path."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                yield f"{path}._target_", value
            elif str(key).startswith("_") and str(key).endswith("_"):
                raise ConfigError(f"{path}.{key}: not supported; a node has a _target_ and its arguments")
            else:
                yield from _targets(f"{path}.{key}", value)
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _targets(f"{path}[{index}]", value)


def _check_name(path: str, target: Any, group: str, allow: Sequence[str]) -> None:
    if group not in COMPONENT_GROUPS:
        raise ConfigError(f"{path}={target}: nothing is built from {group}; remove the _target_")
    if not isinstance(target, str) or not _NAME.fullmatch(target):
        raise ConfigError(
            f"{path}={target}: give the dotted name of a class or function, such as mypkg.net.build"
        )
    if not admits_name(target, group) and not _is_trusted(target, allow):
        raise ConfigError(f"{path}={target}: not allowed here; {_what_is(group, target)}")


def _what_is(group: str, target: str) -> str:
    """What a group takes, for someone who asked for something else."""
    root = target.partition(".")[0]
    if root in SHIPPED:
        near = did_you_mean(target, own_targets(group))
        return f"{group} takes {described(group)}{f'; {near}' if near else ''}"
    return f"{group} takes {described(group)}; for a package you trust add allow=[{root}] to the command line"


def allows_module(name: str, allow: Sequence[str]) -> bool:
    """Whether the command line allows this module, or the package it is in."""
    return name in allow or _is_trusted(name, allow)


def add_current_folder(allow: Sequence[str]) -> None:
    """Make the current folder importable: allowed packages may be in it."""
    folder = str(Path.cwd())
    if allow and folder not in sys.path:
        sys.path.insert(0, folder)


def _is_trusted(name: str, allow: Sequence[str]) -> bool:
    return name.startswith(tuple(f"{package}." for package in allow))


def _resolve(target: str, group: str, allow: Sequence[str]) -> Callable[..., Any]:
    """Import the target and make sure it is what its name says."""
    module_name, _, attribute = target.rpartition(".")
    if module_name.partition(".")[0] == "torchvision":
        importlib.import_module("gpipe_cli.vision")  # torchvision beside a CPU-only torch needs its help
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{group}._target_={target}: {error}; it is looked for in the current folder too"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(
            f"{group}._target_={target}: {module_name} has no {attribute}; {or_list(attribute, public)}"
        )
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        raise ConfigError(f"{group}._target_={target}: is no class or function")
    home = f"{found.__module__}.{found.__qualname__}"
    trusted = _is_trusted(target, allow) and _is_trusted(home, allow)
    if not trusted and not admits_object(target, found, group):
        raise ConfigError(
            f"{group}._target_={target}: is really {home}, which is not allowed here; {_what_is(group, home)}"
        )
    return found


def _check_arguments(
    function: Callable[..., Any],
    target: str,
    path: str,
    arguments: dict[str, Any],
    offered: Mapping[str, Any],
) -> None:
    """Unknown, missing, misfitting or downloading arguments; adds `None` where a default would download."""
    parameters = inspect.signature(function).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    hints = _hints(function)
    if function.__module__.startswith("torchvision."):
        _refuse_downloads(function, target, path, arguments)
    for key, value in arguments.items():
        if key in offered or (key not in parameters and not takes_any):
            known = [name for name in parameters if name not in offered]
            raise ConfigError(f"unknown key '{path}.{key}': {target} does not take it; {or_list(key, known)}")
        built = isinstance(value, Mapping) and "_target_" in value
        problem = None if built else mismatch(value, hints.get(key, Any))
        if problem:
            raise ConfigError(f"{path}.{key}={value}: {problem}")
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and name not in arguments and name not in offered:
            raise ConfigError(f"{path}.{name}: {target} needs it; give {path}.{name}=...")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Annotations of the arguments; a target whose annotations cannot be read is not judged by them."""
    subject = function.__init__ if inspect.isclass(function) else function
    try:
        return inspect.get_annotations(subject, eval_str=True)
    except (NameError, TypeError, AttributeError):
        return {}


def _refuse_downloads(
    function: Callable[..., Any], target: str, path: str, arguments: dict[str, Any]
) -> None:
    for key, value in arguments.items():
        if _DOWNLOADS.match(key) and value not in (None, False):
            raise ConfigError(f"{path}.{key}={value}: {target} would download; only null is allowed")
    for key, parameter in _builder(function, arguments).items():
        if _DOWNLOADS.match(key) and parameter.default not in (None, False):
            arguments.setdefault(key, None)


def _builder(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of what will build the model: torchvision's `get_model` passes all it gets to another."""
    if function.__name__ == "get_model":
        from gpipe_cli.vision import torchvision

        try:
            function = torchvision.models.get_model_builder(str(arguments.get("name")))
        except ValueError:  # torchvision knows no such model, which it will say itself
            return {}
    return inspect.signature(function).parameters
