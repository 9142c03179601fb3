"""The names of the files of a snapshot: one file of each kind or, of several ranks, a shard of each kind per rank.

Shards have the names that Hugging Face gives them, and an index says which shard holds which tensor. gpipe writes the
index for other programs: it reads the tensors' names in the headers of the shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

MODEL, OPTIMIZER, BUFFERS = "model.safetensors", "optimizer.safetensors", "buffers.safetensors"
FILES = (MODEL, OPTIMIZER, BUFFERS)
"""The files of a snapshot that a single process wrote, and the kinds of all others."""
INDEX = ".index.json"
_SHARD = re.compile(r"(model|optimizer|buffers)-(\d{5})-of-(\d{5})(\.safetensors)", flags=re.ASCII)


def shard_name(kind: str, rank: int, ranks: int) -> str:
    """The name of the file in which a rank writes its tensors of this kind."""
    if ranks == 1:
        return kind
    stem, _, suffix = kind.partition(".")
    return f"{stem}-{rank + 1:05d}-of-{ranks:05d}.{suffix}"


def kind_of(name: str) -> str | None:
    """The kind of a file of tensors; None for any other name, such as that of an index."""
    match = _SHARD.fullmatch(name)
    kind = name if match is None else f"{match[1]}{match[4]}"
    return kind if kind in FILES else None


def is_sharded(names: Collection[str]) -> bool:
    return any(_SHARD.fullmatch(name) for name in names)


def expected_names(names: Collection[str]) -> set[str]:
    """The names that belong together with these shards: all shards of the model, and an index of each kind."""
    shards = {name: match for name in names if (match := _SHARD.fullmatch(name))}
    counts = {int(match[3]) for match in shards.values()}
    if len(counts) != 1 or min(counts) < 2:  # a single writer has no shards
        return set()
    (count,) = counts
    model = {shard_name(MODEL, rank, count) for rank in range(count)}
    others = {name for name, match in shards.items() if 1 <= int(match[2]) <= count}
    kinds = {kind for name in (*model, *others) if (kind := kind_of(name)) is not None}
    return {*model, *others, *(f"{kind}{INDEX}" for kind in kinds)}


def encode_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """Which file holds which tensor, in the form that Hugging Face's libraries read."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return f"{json.dumps(index, indent=2, ensure_ascii=False)}\n".encode()
