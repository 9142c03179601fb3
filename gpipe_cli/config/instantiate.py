"""Builds the object that a component's node describes: `_target_` and its arguments, checked before the call.

Arguments that would make torchvision download are rejected.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any

from gpipe_cli.config.targets import resolve_target
from gpipe_cli.errors import ConfigError, DataError, GpipeError, or_list
from gpipe_cli.values import flatten

YAML_TYPES: Mapping[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    **dict.fromkeys((str, Path), ("text", (str,))),
    **dict.fromkeys((list, tuple, Sequence), ("a list in brackets, such as [1,2]", (list, tuple))),
    dict: ("a mapping", (dict,)),
    **dict.fromkeys((None, NoneType), ("null", (NoneType,))),
}
"""What messages call an annotation, and the types of the values that fit it; true is no number, as it is to Python."""
_DOWNLOADS = re.compile(r"weights|pretrained|download$")


def instantiate(
    node: Mapping[str, Any], group: str, allow: Sequence[str] = (), *, path: str | None = None, **offered: Any
) -> Any:
    """Build the object that the node describes; the arguments are those of `bind`."""
    return bind(node, group, allow, offered, path)()


def bind(
    node: Mapping[str, Any],
    group: str,
    allow: Sequence[str] = (),
    offered: Mapping[str, Any] = MappingProxyType({}),
    path: str | None = None,
) -> Callable[[], Any]:
    """Check the target and its arguments, and every component inside them; the returned function builds the object.

    path: what messages call the node; by default the group.
    `offered` are arguments that no configuration can give (a module, parameters). The target gets those it names.
    """
    path, target = path or group, node.get("_target_")
    function = resolve_target(f"{path}._target_", target, group, allow)
    parameters = _parameters(function)
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    if function.__module__.startswith("torchvision."):
        _disable_downloads(function, f"{target}", path, arguments)
    _check_arguments(parameters, f"{target}", path, arguments, offered)
    builders = {key: _builder(value, f"{path}.{key}", group, allow) for key, value in arguments.items()}
    runtime = {name: value for name, value in offered.items() if name in parameters}

    def build() -> Any:
        built = {
            key: _with_paths(build_argument(), parameters.get(key))
            for key, build_argument in builders.items()
        }
        try:
            return function(**built, **runtime)
        except (GpipeError, MemoryError):
            raise
        except Exception as error:
            # torch and torchvision may raise anything about their arguments, and where memory runs out.
            of_library = function.__module__.partition(".")[0] in ("torch", "torchvision")
            about_values = isinstance(error, TypeError | ValueError)
            if not about_values and (not of_library or "alloc" in str(error)):
                raise
            if isinstance(error, OSError):
                raise DataError(f"{path}: {target}: {error}") from error
            reason = str(error) or type(error).__name__
            raise ConfigError(f"{path}: {target} rejects these values: {reason}") from error

    return build


def accepted_arguments(node: Mapping[str, Any], group: str, allow: Sequence[str] = ()) -> frozenset[str]:
    """The names of the arguments that the node's target takes."""
    function = resolve_target(f"{group}._target_", node.get("_target_"), group, allow)
    return frozenset(inspect.signature(function).parameters)


def kept_keys(
    node: Mapping[str, Any], group: str, allow: Sequence[str], types: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys of a component that gpipe uses itself, unless the target takes them; types: those of all such keys."""
    if not types.keys() & node.keys():
        return {}
    taken = accepted_arguments(node, group, allow)
    if str(node["_target_"]).startswith("torchvision."):
        taken = frozenset(name for name in taken if not _DOWNLOADS.match(name))
    keys = {key: node[key] for key in types if key in node and key not in taken}
    for key, value in keys.items():
        if problem := type_mismatch(value, types[key]):
            raise ConfigError(f"{group}.{key}={value}: {problem}")
    return keys


def path_arguments(node: Mapping[str, Any], group: str, allow: Sequence[str], path: str) -> Iterator[str]:
    """The keys of text whose annotation has pathlib's Path in it, and those of components inside the node."""
    parameters = _parameters(resolve_target(f"{path}._target_", node["_target_"], group, allow))
    for name, argument in node.items():
        is_path = name in parameters and Path in _leaf_types(parameters[name].annotation)
        for key, value in flatten(argument, f"{path}.{name}", inner=True):
            if isinstance(value, Mapping) and "_target_" in value:
                yield from path_arguments(value, group, allow, key)
            elif is_path and isinstance(value, str):
                yield key


def type_mismatch(value: Any, annotation: Any) -> str | None:
    """`expected a number`, or None if the YAML value fits the annotation or the annotation cannot be judged."""
    members = [
        member
        for member in union_members(annotation)
        # No YAML value is ever a tensor, so `float | Tensor` still asks for a number.
        if not (isinstance(member, type) and member.__module__.startswith("torch"))
    ]
    if any(member not in YAML_TYPES or type(value) in YAML_TYPES[member][1] for member in members):
        return None
    return f"expected {' or '.join(dict.fromkeys(YAML_TYPES[member][0] for member in members))}"


def union_members(annotation: Any) -> list[Any]:
    """The types that an annotation allows, and what `Annotated` says of them."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return [member for part in typing.get_args(annotation) for member in union_members(part)]
    return [origin or annotation]


def _leaf_types(annotation: Any) -> list[Any]:
    """The types in an annotation, also those in lists; those of `list[Path] | None` are Path and None."""
    arguments = typing.get_args(annotation)
    return [leaf for argument in arguments for leaf in _leaf_types(argument)] if arguments else [annotation]


def _with_paths(value: Any, parameter: inspect.Parameter | None) -> Any:
    """The value of an argument, with paths instead of text where its annotation has paths only."""
    leaves = [] if parameter is None else _leaf_types(parameter.annotation)
    if Path not in leaves or str in leaves:
        return value
    if isinstance(value, list):
        return [_with_paths(item, parameter) for item in value]
    return Path(value) if isinstance(value, str) else value


def _builder(value: Any, path: str, group: str, allow: Sequence[str]) -> Callable[[], Any]:
    """Return a function that gives the argument, with every component inside it built."""
    if isinstance(value, Mapping) and "_target_" in value:
        return bind(value, group, allow, path=path)
    if isinstance(value, Mapping):
        members = {key: _builder(item, f"{path}.{key}", group, allow) for key, item in value.items()}
        return lambda: {key: build() for key, build in members.items()}
    if isinstance(value, list | tuple):
        items = [_builder(item, f"{path}[{index}]", group, allow) for index, item in enumerate(value)]
        return lambda: [build() for build in items]
    return lambda: value


def _check_arguments(
    parameters: Mapping[str, inspect.Parameter],
    target: str,
    path: str,
    arguments: Mapping[str, Any],
    offered: Mapping[str, Any],
) -> None:
    """Reject arguments that are unknown, missing or of the wrong type."""
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key, value in arguments.items():
        if key in offered or (key not in parameters and not takes_any):
            known = [name for name in parameters if name not in offered]
            raise ConfigError(f"unknown key '{path}.{key}': {target} does not take it; {or_list(key, known)}")
        is_component = isinstance(value, Mapping) and "_target_" in value
        annotation = parameters[key].annotation if key in parameters and not is_component else Any
        if problem := type_mismatch(value, annotation):
            raise ConfigError(f"{path}.{key}={value}: {problem}")
    for name, parameter in parameters.items():
        takes_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if takes_name and parameter.default is parameter.empty and name not in {*arguments, *offered}:
            raise ConfigError(f"{path}.{name}: {target} needs it; give {path}.{name}=...")


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters, with their annotations as types where these can be evaluated."""
    with suppress(NameError, TypeError, AttributeError):
        return inspect.signature(function, eval_str=True).parameters
    return inspect.signature(function).parameters


def _disable_downloads(
    function: Callable[..., Any], target: str, path: str, arguments: dict[str, Any]
) -> None:
    """Reject arguments that download, and pass None where the default would."""
    for key, value in arguments.items():
        if _DOWNLOADS.match(key) and value not in (None, False):
            raise ConfigError(f"{path}.{key}={value}: {target} would download; only null is allowed")
    if function.__name__ == "get_model":  # it forwards its arguments
        from gpipe_cli.vision import torchvision

        with suppress(ValueError):  # torchvision has no such model; the call itself will report it
            function = torchvision.models.get_model_builder(str(arguments.get("name")))
    for key, parameter in inspect.signature(function).parameters.items():
        if _DOWNLOADS.match(key) and parameter.default not in (None, False):
            arguments.setdefault(key, None)
