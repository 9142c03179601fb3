"""Select parameters by patterns: `freeze=[stem,layer1,"*.bn?.weight"]`, `optimizer.groups=[{match: head, ...}]`.

A pattern is the name of a layer, module or parameter, which includes everything below it, or a glob of such names.
Names are those of the original model; the names of layers, which `gpipe profile` shows, count too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from gpipe_cli.errors import ConfigError, did_you_mean
from gpipe_cli.sequential.sequence import Sequence

_MAX_NAMES = 10
"""In a message."""


def select_parameters(
    model: nn.Sequential, patterns: Iterable[str], key: str, words: Iterable[str] = ()
) -> dict[str, nn.Parameter]:
    """The parameters that at least one pattern matches, by their original names and in their order.

    A parameter with several names is selected by any of them. Raises ConfigError, which names `key`, about a pattern
    that matches nothing and suggests a name or one of `words`, which the caller understands.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(parameter, []).extend(names_at(model, f"{path}.{own}".removeprefix(".")))
    selected = set()
    for pattern in patterns:
        matched = {
            parameter for parameter, own in names.items() if any(matches(pattern, name) for name in own)
        }
        if not matched:
            raise _no_match(pattern, [name for own in names.values() for name in own], key, words)
        selected |= matched
    return {name: parameter for name, parameter in model.named_parameters() if parameter in selected}


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern is, or as a glob fits, the name or a dotted prefix of it."""
    return any(prefix == pattern or fnmatchcase(prefix, pattern) for prefix in _prefixes(name))


def names_at(model: nn.Sequential, path: str) -> list[str]:
    """What a pattern may call the module or parameter at a layer key: its original name, and its name by layer."""
    if not isinstance(model, Sequence):
        return [path]
    index, _, rest = path.partition(".")
    layer = [model.layer_names[int(index)]] if index.isdecimal() else []
    by_layer = ".".join(filter(None, (*layer, rest)))
    return list(dict.fromkeys(filter(None, (model.original_key(path), by_layer))))


def _prefixes(name: str) -> Iterator[str]:
    """`layer1`, `layer1.0`, `layer1.0.conv1` of the last of these."""
    return accumulate(name.split("."), "{}.{}".format)


def _no_match(pattern: str, names: Iterable[str], key: str, words: Iterable[str]) -> ConfigError:
    known = list(dict.fromkeys(prefix for name in names for prefix in _prefixes(name)))
    known.extend(words)
    outermost = [name for name in known if "." not in name]
    more = ", ..." if len(outermost) > _MAX_NAMES else ""
    cure = did_you_mean(pattern, known) or f"it has {', '.join(outermost[:_MAX_NAMES])}{more}"
    return ConfigError(f"{key}={pattern}: no parameter of the model has such a name; {cure}")
