"""How a Sequence takes in a state_dict of the original model.

torch hands a state_dict down the tree of modules by the names of children. Before that the original names
become layer keys (`take_original_names`); after it, what the layers reported missing, unexpected or misshapen
becomes original names again (`report_original_names`). Both are hooks, so they work wherever the sequence
stands in a larger model. This file knows nothing of files: it sees tensors by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

if TYPE_CHECKING:
    from gpipe_cli.sequential.sequence import Sequence


class IncompatibleKeys(Protocol):
    missing_keys: list[str]
    unexpected_keys: list[str]


@final
@dataclass(frozen=True)
class Load:
    """Where the reports of one load begin: torch collects those of all modules in the same three lists."""

    prefix: str
    missing: int
    unexpected: int
    errors: int
    messages: list[str]


def take_original_names(
    sequence: Sequence,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    messages: list[str],
) -> None:
    # All of them leave before the first enters: the name of one may be the layer key of another.
    given = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    layer_keys = _layer_keys(sequence)
    for key, value in given.items():
        name = key.removeprefix(prefix)
        keys = layer_keys.get(name) or _keys_at_owner(sequence, name)
        if not keys:
            unexpected_keys.append(key)
        state_dict.update({prefix + layer_key: value for layer_key in keys})
    sequence.loading = Load(prefix, len(missing_keys), len(unexpected_keys), len(messages), messages)


def report_original_names(sequence: Sequence, incompatible: IncompatibleKeys) -> None:
    load, sequence.loading = sequence.loading, None
    assert load is not None, "the hook before loading has run"

    def original(key: str) -> str:
        return load.prefix + sequence.original_key(key.removeprefix(load.prefix))

    for reported, start in (
        (incompatible.missing_keys, load.missing),
        (incompatible.unexpected_keys, load.unexpected),
    ):
        # dict: a tensor held by two layers is reported by both, and has one name.
        reported[start:] = dict.fromkeys(map(original, reported[start:]))
    names = {
        load.prefix + key: load.prefix + name for name, keys in _layer_keys(sequence).items() for key in keys
    }
    load.messages[load.errors :] = [
        re.sub(r'[^\s":]+', lambda word: names.get(word[0], word[0]), message)
        for message in load.messages[load.errors :]
    ]


def _layer_keys(sequence: Sequence) -> dict[str, list[str]]:
    """Original name -> the layer keys that stand for it; more than one where layers share a tensor."""
    layer_keys: dict[str, list[str]] = {}
    for index, layer in enumerate(sequence):
        for key in layer.state_dict(keep_vars=True):
            layer_key = f"{index}.{key}"
            layer_keys.setdefault(sequence.original_key(layer_key), []).append(layer_key)
    return layer_keys


def _keys_at_owner(sequence: Sequence, name: str) -> list[str]:
    """The key at the innermost module that `name` lies in; some accept the names of their older versions."""
    modules = {
        sequence.original_key(path): path
        for path, module in sequence.named_modules(remove_duplicate=False)
        if module is not sequence
    }
    owner = name
    while owner := owner.rpartition(".")[0]:
        if owner in modules:
            return [modules[owner] + name.removeprefix(owner)]
    return []
