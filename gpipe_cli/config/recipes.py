"""Which recipe is meant: `recipe=unet_speed recipe.scale=small` as people write it, and as Hydra's group has it.

The folder is called recipes, and so is Hydra's group. Another scale of a recipe is a file of the same name in a
folder of that scale's name. Nothing is read here: whether there is such a file is for Hydra to find out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpipe_cli.config.suggest import or_list
from gpipe_cli.errors import ConfigError

SMALL = "small"
SCALES = ("full", SMALL)
SCALE_KEY = "recipe.scale"
_RECIPE, _SCALE, _GROUP = "recipe=", f"{SCALE_KEY}=", "recipes="


def to_group(words: Sequence[str]) -> list[str]:
    """The words of a command line with what they say of recipes put into one choice of the group."""
    scales = [word.removeprefix(_SCALE) for word in words if word.startswith(_SCALE)]
    if len(scales) > 1:
        raise ConfigError(f"{SCALE_KEY}: given {len(scales)} times ({', '.join(scales)}); give it once")
    if scales and not any(word.startswith((_RECIPE, _GROUP)) for word in words):
        raise ConfigError(
            f"{_SCALE}{scales[0]}: is a recipe's, and none is given; gpipe train recipe=unet_speed {_SCALE}{SMALL}"
        )
    return [
        _choice(word.removeprefix(_RECIPE), scales) if word.startswith(_RECIPE) else word
        for word in words
        if not word.startswith(_SCALE)
    ]


def as_written(words: Iterable[str]) -> Iterator[str]:
    """The words of one job as people write them."""
    for word in words:
        if not word.startswith(_GROUP):
            yield word
            continue
        name = word.removeprefix(_GROUP)
        yield f"{_RECIPE}{name.removeprefix(f'{SMALL}/')}"
        if name.startswith(f"{SMALL}/"):
            yield f"{_SCALE}{SMALL}"


def _choice(recipes: str, scales: Sequence[str]) -> str:
    """Both may be lists of a sweep, whose jobs have each recipe in each scale."""
    wanted = scales[0].split(",") if scales else ["full"]
    for scale in wanted:
        if scale not in SCALES:
            raise ConfigError(f"{_SCALE}{scale}: {or_list(scale, SCALES)}")
    names = (
        name if scale == "full" else f"{scale}/{name}" for name in recipes.split(",") for scale in wanted
    )
    return f"{_GROUP}{','.join(names)}"
