"""What a config may name in `_target_`, and the one function that turns such a node into an object.

A config is data, perhaps somebody else's. Every `_target_` of the tree is held against the allow-list of its
group before anything is imported, and the object found is held against it again, so that an alias such as
`torch.nn.modules.module.torch.load` does not pass. Arguments that would make torchvision download are refused.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gpipe_cli.config.kinds import mismatch
from gpipe_cli.config.suggest import or_list
from gpipe_cli.errors import ConfigError, GpipeError

# A name that ends in a dot allows all below it, any other allows itself.
# Of torchvision's datasets those are named that read no pickle.
ALLOWED: dict[str, tuple[str, ...]] = {
    "model": ("torch.nn.", "torchvision.models.", "gpipe_cli.models."),
    "data": (
        "gpipe_cli.data.",
        *(
            f"torchvision.datasets.{name}"
            for name in ("FakeData", "ImageFolder", "MNIST", "FashionMNIST", "KMNIST")
        ),
    ),
    "transform": ("gpipe_cli.data.transforms.",),
    "loss": ("torch.nn.", "gpipe_cli.losses."),
    "logger": ("gpipe_cli.loggers.",),
    "balance": ("gpipe_cli.balance.",),
    "engine": ("gpipe_cli.engines.",),
    "optimizer": ("torch.optim.",),
    "lr_schedule": ("gpipe_cli.training.lr_schedules.",),
}
DOWNLOADS = frozenset({"weights", "weights_backbone", "pretrained", "pretrained_backbone", "download"})
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
    return lambda: function(**{key: make() for key, make in makers.items()}, **runtime)


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
    if group not in ALLOWED:
        raise ConfigError(f"{path}={target}: nothing is built from {group}; remove the _target_")
    if not isinstance(target, str) or not _NAME.fullmatch(target):
        raise ConfigError(
            f"{path}={target}: give the dotted name of a class or function, such as mypkg.net.build"
        )
    if not _is_allowed(target, group, allow):
        root = target.partition(".")[0]
        allowed = ", ".join(f"{name}*" if name.endswith(".") else name for name in ALLOWED[group])
        raise ConfigError(
            f"{path}={target}: not allowed here ({group}: {allowed}); "
            f"for a package you trust add allow=[{root}] to the command line"
        )


def _is_allowed(name: str, group: str, allow: Sequence[str]) -> bool:
    own = tuple(f"{package}." for package in allow)
    return any(
        name.startswith(entry) if entry.endswith(".") else name == entry for entry in (*ALLOWED[group], *own)
    )


def _resolve(target: str, group: str, allow: Sequence[str]) -> Callable[..., Any]:
    """Import the target and make sure it is what its name says."""
    module_name, _, attribute = target.rpartition(".")
    if module_name.partition(".")[0] == "torchvision":
        importlib.import_module("gpipe_cli.vision")  # torchvision beside a CPU-only torch needs its help
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{group}._target_={target}: {error}; it is looked for in the current folder too"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(
            f"{group}._target_={target}: {module_name} has no {attribute}; {or_list(attribute, public)}"
        )
    home = f"{getattr(found, '__module__', None)}.{getattr(found, '__qualname__', '')}"
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        raise ConfigError(f"{group}._target_={target}: is no class or function")
    if not _is_allowed(home, group, allow) and not _is_allowed_member(target, group, home):
        raise ConfigError(f"{group}._target_={target}: is really {home}, which is not allowed here")
    return found


def _is_allowed_member(target: str, group: str, home: str) -> bool:
    """A class named singly (torchvision.datasets.MNIST) lives in a module below the named package."""
    return target in ALLOWED[group] and home.startswith(f"{target.rpartition('.')[0]}.")


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
    if target.startswith("torchvision."):
        _refuse_downloads(parameters, target, path, arguments)
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
    parameters: Mapping[str, inspect.Parameter], target: str, path: str, arguments: dict[str, Any]
) -> None:
    for key in DOWNLOADS & arguments.keys():
        if arguments[key] not in (None, False):
            raise ConfigError(f"{path}.{key}={arguments[key]}: {target} would download; only null is allowed")
    for key in DOWNLOADS & parameters.keys() - arguments.keys():
        if parameters[key].default not in (None, False):
            arguments[key] = None
