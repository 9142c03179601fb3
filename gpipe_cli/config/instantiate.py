"""Builds the object that a component's node describes: `_target_` and its arguments, checked before the call.

Arguments that would make torchvision download are rejected.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from gpipe_cli.config.targets import check_target_name, resolve_target
from gpipe_cli.errors import ConfigError, DataError, GpipeError, or_list

TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list such as [1,2]",
    dict: "a mapping",
    type(None): "null",
}
_DOWNLOADS = re.compile(r"weights|pretrained|download$")


def instantiate(
    node: Mapping[str, Any], group: str, allow: Sequence[str] = (), *, path: str | None = None, **offered: Any
) -> Any:
    """Build the object that the node describes.

    path: what messages call the node; by default the group.
    `offered` are arguments that no configuration can give (a module, parameters). The target gets those it names.
    """
    build = bind(node, group, allow, offered, path)
    try:
        return build()
    except GpipeError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path or group}: {node['_target_']} rejects these values: {error}") from error


def bind(
    node: Mapping[str, Any],
    group: str,
    allow: Sequence[str] = (),
    offered: Mapping[str, Any] = MappingProxyType({}),
    path: str | None = None,
) -> Callable[[], Any]:
    """Check the target's arguments against its signature; the returned function makes the call.

    path: what messages call the node; by default the group.
    """
    return _bind(node, path or group, group, allow, offered)


def accepted_arguments(node: Mapping[str, Any], group: str, allow: Sequence[str] = ()) -> frozenset[str]:
    """The names of the arguments that the node's target takes."""
    check_target_name(f"{group}._target_", node.get("_target_"), group, allow)
    return frozenset(inspect.signature(resolve_target(node["_target_"], group, allow)).parameters)


def type_mismatch(value: Any, annotation: Any) -> str | None:
    """`expected a number`, or None if the YAML value fits the annotation or the annotation cannot be judged."""
    members = _yaml_types(annotation)
    if members is None or any(_has_type(value, member) for member in members):
        return None
    names = dict.fromkeys(TYPE_NAMES[member] for member in members if member in TYPE_NAMES)
    return f"expected {' or '.join(names)}"


def _bind(
    node: Mapping[str, Any], path: str, group: str, allow: Sequence[str], offered: Mapping[str, Any]
) -> Callable[[], Any]:
    target = node.get("_target_")
    check_target_name(f"{path}._target_", target, group, allow)
    assert isinstance(target, str)
    function = resolve_target(target, group, allow)
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    _check_arguments(function, target, path, arguments, offered)
    builders = {
        key: _argument_builder(value, f"{path}.{key}", group, allow) for key, value in arguments.items()
    }
    parameters = inspect.signature(function).parameters
    runtime = {name: value for name, value in offered.items() if name in parameters}

    def build() -> Any:
        built = {key: build_argument() for key, build_argument in builders.items()}
        with _as_config_error(function, f"{path}: {target}"):
            return function(**built, **runtime)

    return build


def _argument_builder(value: Any, path: str, group: str, allow: Sequence[str]) -> Callable[[], Any]:
    """Return a function that gives the argument, with every component inside it built."""
    if isinstance(value, Mapping) and "_target_" in value:
        return _bind(value, path, group, allow, {})
    if isinstance(value, Mapping):
        members = {key: _argument_builder(item, f"{path}.{key}", group, allow) for key, item in value.items()}
        return lambda: {key: build() for key, build in members.items()}
    if isinstance(value, list | tuple):
        items = [
            _argument_builder(item, f"{path}[{index}]", group, allow) for index, item in enumerate(value)
        ]
        return lambda: [build() for build in items]
    return lambda: value


@contextmanager
def _as_config_error(function: Callable[..., Any], subject: str) -> Iterator[None]:
    """Report what torch and torchvision raise about their arguments, which may be any exception, as ConfigError."""
    try:
        yield
    except (GpipeError, MemoryError):
        raise
    except Exception as error:
        if function.__module__.partition(".")[0] not in ("torch", "torchvision") or "alloc" in str(error):
            raise
        if isinstance(error, OSError):
            raise DataError(f"{subject}: {error}") from error
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{subject} rejects these values: {reason}") from error


def _check_arguments(
    function: Callable[..., Any],
    target: str,
    path: str,
    arguments: dict[str, Any],
    offered: Mapping[str, Any],
) -> None:
    """Reject arguments that are unknown, missing, of the wrong type, or that download."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    annotations = _annotations(function)
    if function.__module__.startswith("torchvision."):
        _disable_downloads(function, target, path, arguments)
    for key, value in arguments.items():
        if key in offered or (key not in parameters and not takes_any):
            known = [name for name in parameters if name not in offered]
            raise ConfigError(f"unknown key '{path}.{key}': {target} does not take it; {or_list(key, known)}")
        is_component = isinstance(value, Mapping) and "_target_" in value
        problem = None if is_component else type_mismatch(value, annotations.get(key, Any))
        if problem:
            raise ConfigError(f"{path}.{key}={value}: {problem}")
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and name not in arguments and name not in offered:
            raise ConfigError(f"{path}.{name}: {target} needs it; give {path}.{name}=...")


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the arguments; empty if they cannot be evaluated."""
    subject = function.__init__ if inspect.isclass(function) else function
    try:
        return inspect.get_annotations(subject, eval_str=True)
    except (NameError, TypeError, AttributeError):
        return {}


def _disable_downloads(
    function: Callable[..., Any], target: str, path: str, arguments: dict[str, Any]
) -> None:
    """Reject arguments that download, and pass None where the default would."""
    for key, value in arguments.items():
        if _DOWNLOADS.match(key) and value not in (None, False):
            raise ConfigError(f"{path}.{key}={value}: {target} would download; only null is allowed")
    for key, parameter in _model_parameters(function, arguments).items():
        if _DOWNLOADS.match(key) and parameter.default not in (None, False):
            arguments.setdefault(key, None)


def _model_parameters(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> Mapping[str, inspect.Parameter]:
    """The parameters of the function that builds the model: torchvision's `get_model` forwards its arguments."""
    if function.__name__ == "get_model":
        from gpipe_cli.vision import torchvision

        try:
            function = torchvision.models.get_model_builder(str(arguments.get("name")))
        except ValueError:  # torchvision has no such model; the call itself will report it
            return {}
    return inspect.signature(function).parameters


def _yaml_types(annotation: Any) -> list[type] | None:
    """The types that an annotation admits; None if it says something that YAML values cannot be judged by."""
    if annotation is None:
        return [type(None)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [_yaml_types(member) for member in typing.get_args(annotation)]
        return None if None in members else [kind for member in members for kind in (member or [])]
    origin = typing.get_origin(annotation) or annotation
    if origin in (list, tuple, Sequence):
        return [list]
    if origin in TYPE_NAMES:
        return [origin]
    # No YAML value is ever a tensor, so `float | Tensor` still asks for a number.
    return [origin] if isinstance(origin, type) and origin.__module__.startswith("torch") else None


def _has_type(value: Any, kind: type) -> bool:
    if kind in (int, float):
        return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if kind is list:
        return isinstance(value, list | tuple)
    if kind is dict:
        return isinstance(value, Mapping)
    return isinstance(value, kind)
