"""The keys of `optimizer` that divide the parameters into groups: `no_decay` and `groups`; checked without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

NO_DECAY, GROUPS = "no_decay", "groups"
MATCH, LR_SCALE = "match", "lr_scale"
EXAMPLE = "[{match: head, lr_scale: 10}]"


def optimizer_arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """The `optimizer` node without the keys that gpipe uses itself."""
    return {key: value for key, value in node.items() if key not in (NO_DECAY, GROUPS)}


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says about the optimizer: everything except which parameters and their learning rate."""
    return {key: value for key, value in group.items() if key not in (MATCH, LR_SCALE)}


def group_patterns(group: Mapping[str, Any]) -> list[str]:
    match = group[MATCH]
    return [match] if isinstance(match, str) else list(match)


def group_problems(node: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the form of `optimizer.no_decay` and `optimizer.groups`."""
    no_decay, groups = node.get(NO_DECAY), node.get(GROUPS)
    if no_decay is not None and not _is_list_of_names(no_decay):
        yield f"optimizer.{NO_DECAY}={no_decay}: must be a list of names, such as [norm,bias], or []"
    if groups is None:
        return
    if not isinstance(groups, list):
        yield f"optimizer.{GROUPS}={groups}: must be a list such as {EXAMPLE}"
        return
    for index, group in enumerate(groups):
        key = f"optimizer.{GROUPS}[{index}]"
        if not isinstance(group, Mapping) or MATCH not in group:
            yield f"{key}={group}: must say which parameters it is for, such as {EXAMPLE[1:-1]}"
        else:
            yield from _problems_of_group(key, group)


def _problems_of_group(key: str, group: Mapping[str, Any]) -> Iterator[str]:
    match, scale = group[MATCH], group.get(LR_SCALE, 1)
    if not isinstance(match, str) and not (_is_list_of_names(match) and match):
        yield f"{key}.{MATCH}={match}: must be a name or a list of names"
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not scale > 0:
        yield f"{key}.{LR_SCALE}={scale}: must be a positive number"
    if "lr" in group:
        yield f"{key}.lr={group['lr']}: the schedule decides the learning rate; give {LR_SCALE}, a factor of it"
    for name in group_options(group):  # those of the optimizer are checked when it is made
        if close := get_close_matches(name, (MATCH, LR_SCALE), n=1, cutoff=0.8):
            yield f"unknown key '{key}.{name}'; did you mean '{close[0]}'?"
    if len(group) == 1:
        yield f"{key}: changes nothing; give {LR_SCALE}, weight_decay or another option of the optimizer"
    for name in ("params", "_target_"):
        if name in group:
            yield f"unknown key '{key}.{name}'; remove it"


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)
