"""Select parameters by patterns, as in `optimizer.groups=[{match: head, ...}]`, and freeze them, as in `freeze=[stem]`.

A pattern is the name of a layer, module or parameter, which includes everything below it, or a glob of such names.
Names are those of the original model; the names of layers, which `gpipe profile` shows, count too.

A frozen parameter has no gradient, and norms whose parameters are all frozen stay in eval mode: a batch norm in train
mode would go on changing its running statistics, and with them what a frozen layer computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import final

from torch import nn

from gpipe_cli.errors import ConfigError, did_you_mean
from gpipe_cli.sequential.sequence import LayerSequence

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
    if not isinstance(model, LayerSequence):
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
    hint = did_you_mean(pattern, known) or f"it has {', '.join(outermost[:_MAX_NAMES])}{more}"
    return ConfigError(f"{key}={pattern}: no parameter of the model has such a name; {hint}")


@final
@dataclass(frozen=True)
class FrozenParameters:
    patterns: tuple[str, ...]
    """As the user gave them."""
    names: tuple[str, ...]
    """The names of the parameters that the patterns match."""
    elements: int
    all_elements: int
    """The number of elements of the whole model."""

    def __str__(self) -> str:
        numbers = f"{self.elements:,} of {self.all_elements:,} parameters"
        return f"{len(self.names)} tensors with {numbers}: {', '.join(self.patterns)}"


def freeze(model: nn.Sequential, patterns: Collection[str], key: str = "freeze") -> FrozenParameters | None:
    """Freeze what the patterns match; None without patterns. Raises ConfigError if nothing is left to train."""
    if not patterns:
        return None
    frozen = select_parameters(model, patterns, key)
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    held = set(frozen.values())
    for path, module in model.named_modules(remove_duplicate=False):
        own = set(module.parameters(recurse=False))
        # A norm without parameters is frozen with the layer that it is in.
        named = any(matches(pattern, name) for pattern in patterns for name in names_at(model, path))
        if tracks_statistics(module) and (own <= held if own else named):
            keep_in_eval_mode(module)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{key}=[{','.join(patterns)}]: freezes every parameter of the model, so that there is nothing to train; "
            "remove at least one of them"
        )
    return FrozenParameters(
        tuple(patterns),
        tuple(frozen),
        sum(parameter.numel() for parameter in frozen.values()),
        sum(parameter.numel() for parameter in model.parameters()),
    )


def tracks_statistics(module: nn.Module) -> bool:
    """Whether it is a batch norm, or another module that keeps running statistics."""
    return any(name.startswith("running_") for name, _ in module.named_buffers(recurse=False))


def keep_in_eval_mode(module: nn.Module) -> None:
    """Make `train()` of the module, and of every module that contains it, leave it in eval mode."""
    # Not a bound method: a partial is copied together with the module that it refers to.
    module.train = partial(_stay_in_eval_mode, module)  # type: ignore[method-assign]
    module.eval()


def stays_in_eval_mode(module: nn.Module) -> bool:
    train = vars(module).get("train")
    return isinstance(train, partial) and train.func is _stay_in_eval_mode


def _stay_in_eval_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(module, False)
