"""What the layers of a traced model are called for people: where they come from in the model."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["layer_names"]


def layer_names(held: Sequence[Sequence[str]]) -> list[str]:
    """For each layer the module that it is all of, or the first and last part of the model it uses.

    held: for each layer the dotted paths it uses, in the order of use.
    """
    return [_whole(held, index) or _range(paths) for index, paths in enumerate(held)]


def _whole(held: Sequence[Sequence[str]], index: int) -> str:
    """The innermost module that all paths of a layer lie in, if no other layer uses a part of it."""
    name = _common(held[index])
    others = (path for place, paths in enumerate(held) if place != index for path in paths)
    return "" if any(f"{path}.".startswith(f"{name}.") for path in others) else name


def _range(paths: Sequence[str]) -> str:
    """`features.0..1` for features.0 to features.1."""
    if not paths:
        return "nothing"
    first, last = paths[0], paths[-1]
    shared = _common([first, last])
    return first if first == last else f"{first}..{last.removeprefix(f'{shared}.')}"


def _common(paths: Sequence[str]) -> str:
    common: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
