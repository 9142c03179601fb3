"""The words of a command line that set keys: `key=value`, `+key=value`, `~key`, `group=option`, `recipe=name`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from gpipe_cli.errors import ConfigError, or_list

SMALL = "small"
SCALES = ("full", SMALL)
SCALE_KEY = "recipe.scale"
_RECIPE, _SCALE, _RECIPE_GROUP = "recipe=", f"{SCALE_KEY}=", "recipes="
JOBS_KEY, MOST_JOBS = "jobs", 1024
JOBS_MEANING = "With -m: how many jobs of the sweep run at a time; they divide devices and cores."
CONFIG_MEANING = (
    "A file of keys, such as `epochs: 5`, or the config.yaml of a run; the command line overrides it."
)
_QUOTED = r"""\s* (?: "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' ) \s*"""
_IS_QUOTED = re.compile(_QUOTED, re.VERBOSE)
_PIECE = re.compile(
    rf"""
      (?P<quoted> {_QUOTED} (?=[\]}}),:]|$) )
    | (?P<bracket> [\[\]{{}}(),] )
    | (?P<plain> (?: \$\{{[^}}]*\}} | \\. | [:=] {_QUOTED} (?=[}}),]) | [^\[\]{{}}(),] )+ )
    """,
    re.VERBOSE,
)
_NEEDS_NO_QUOTES = re.compile(r"(?:\$\{[^}]*\}|\\.|[\w/\-+.$%*@?|:\\ \t])*", re.ASCII)
TEXT_KEYS = ("prompt",)
"""Keys whose value is any text: nothing in it is a list, a sweep, a reference or a quote."""
ANY_CHARACTER = (*TEXT_KEYS, "data.delimiter")
"""Keys whose value may contain line breaks, tabs and invisible characters."""
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
"""Outside quotes the pair means the second character alone, inside quotes it means both."""


def override_key(word: str) -> str:
    """The key or group that an override sets: `optimizer.lr` for `+optimizer.lr=1` and for `~optimizer.lr`."""
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def override_group(word: str) -> str:
    """The first part of the key: `optimizer` for `optimizer.lr=1` and for `optimizer=sgd`."""
    return override_key(word).partition(".")[0]


def sets_key(overrides: Iterable[str], key: str) -> bool:
    """Whether an override sets the key, or a key below it."""
    return any(f"{override_key(word)}.".startswith(f"{key}.") for word in overrides)


def check_given_once(words: Iterable[str]) -> None:
    """Refuse a key with two values: one of them would have no effect. `~key +key=value` replaces a key."""
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        before = given.setdefault(override_key(word), value) if equals and word[0] != "~" else value
        if before != value:
            raise ConfigError(f"{key}: given as {before} and as {value}; give it once")


def without_keys(overrides: Iterable[str], keys: Collection[str]) -> tuple[str, ...]:
    return tuple(word for word in overrides if override_key(word) not in keys)


def recipe_to_group(words: Sequence[str]) -> list[str]:
    """Turn `recipe=x recipe.scale=small` into `recipes=small/x`, an option of the Hydra group `recipes`.

    The folder is called recipes, and so is Hydra's group. A recipe of another scale is a file of the same name in a
    folder named after the scale.
    """
    scales = [word.removeprefix(_SCALE) for word in words if word.startswith(_SCALE)]
    if len(scales) > 1:
        raise ConfigError(f"{SCALE_KEY}: given {len(scales)} times ({', '.join(scales)}); give it once")
    if scales and not any(word.startswith((_RECIPE, _RECIPE_GROUP)) for word in words):
        raise ConfigError(
            f"{_SCALE}{scales[0]}: needs a recipe, and none is given; gpipe train recipe=unet_speed {_SCALE}{SMALL}"
        )
    wanted = scales[0].split(",") if scales else ["full"]
    for scale in wanted:
        if scale not in SCALES:
            raise ConfigError(f"{_SCALE}{scale}: {or_list(scale, SCALES)}")
    # In a sweep both may be lists, and the jobs have each recipe in each scale.
    return [
        _RECIPE_GROUP
        + ",".join(
            name if scale == "full" else f"{scale}/{name}"
            for name in word.removeprefix(_RECIPE).split(",")
            for scale in wanted
        )
        if word.startswith(_RECIPE)
        else word
        for word in words
        if not word.startswith(_SCALE)
    ]


def take_jobs(words: Sequence[str]) -> tuple[list[str], int]:
    """The words without `jobs=2`, and how many jobs of a sweep run side by side."""
    given = [word.partition("=")[2] for word in words if override_key(word) == JOBS_KEY]
    if len(given) > 1:
        raise ConfigError(f"{JOBS_KEY}: given {len(given)} times ({', '.join(given)}); give it once")
    if given and not (given[0].isascii() and given[0].isdecimal() and 0 < int(given[0]) <= MOST_JOBS):
        raise ConfigError(f"{JOBS_KEY}={given[0]}: must be a whole number from 1 to {MOST_JOBS}")
    return [word for word in words if override_key(word) != JOBS_KEY], int(given[0]) if given else 1


def group_to_recipe(words: Iterable[str]) -> Iterator[str]:
    """The reverse of `recipe_to_group`, for the words of one job."""
    for word in words:
        if not word.startswith(_RECIPE_GROUP):
            yield word
            continue
        name = word.removeprefix(_RECIPE_GROUP)
        yield f"{_RECIPE}{name.removeprefix(f'{SMALL}/')}"
        if name.startswith(f"{SMALL}/"):
            yield f"{_SCALE}{SMALL}"


def quote_override(word: str) -> str:
    """Quote the parts of a value that Hydra's grammar has no characters for: run_dir=日本, data.path=/mnt/R&D.

    Outside quotes Hydra takes ASCII letters, digits and a few other characters. Lists, mappings, functions, sweeps,
    references and text that is already quoted stay as they are.
    """
    key, equals, value = word.partition("=")
    if equals and key in TEXT_KEYS:
        return f"{key}={quoted(escape_references(value))}"
    open_brackets: list[str] = []
    pieces = []
    for match in _PIECE.finditer(value):
        piece = match[0]
        if match["bracket"] is not None:
            if piece in "[{(":
                open_brackets.append(piece)
            elif piece in "]})" and open_brackets:
                open_brackets.pop()
        elif match["plain"] is not None:
            innermost = open_brackets[-1] if open_brackets else ""
            # In a mapping a colon separates key and value, in a function call an equals sign does.
            separator = {"{": ":", "(": "="}.get(innermost, "")
            name, between, rest = piece.partition(separator) if separator else ("", "", piece)
            piece = f"{_quote(name)}{between}{_quote(rest)}"
        pieces.append(piece)
    return f"{key}{equals}{''.join(pieces)}"


def escape_references(text: str) -> str:
    """The text, written so that OmegaConf reads it as it is: a backslash makes plain text of a reference."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def quoted(text: str) -> str:
    """The text in quotes, as Hydra's grammar reads it."""
    # Inside quotes a backslash stands for itself unless a quote follows it.
    escaped = re.sub(r"(\\*)('|\Z)", lambda end: end[1] * 2 + (r"\'" if end[2] else ""), text)
    return f"'{escaped}'"


def _quote(text: str) -> str:
    inner = text.strip(" \t")
    if _NEEDS_NO_QUOTES.fullmatch(inner) or _IS_QUOTED.fullmatch(inner):
        return text
    return text.replace(inner, quoted(_ESCAPED.sub(r"\1", inner)))
