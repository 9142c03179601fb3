"""Values as people write them in a configuration: sizes, durations, texts, bounded numbers and nested mappings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from gpipe_cli.errors import ConfigError

FilePath = Annotated[str, Path]
"""An argument of a component that names a file or folder: config.yaml has it absolute."""
BYTE_UNITS = {
    "B": 1,
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("kMGT", 1)},
}
AUTO = "auto"
"""The value of data.tokenizer that means the tokenizer of the model."""
IGNORED_LABEL = -100
"""Marks a label that losses and metrics leave out, such as that of a token of padding; torch uses the same number."""
POSITIONS = "position_ids"
"""The argument of a model with the place of each token in its document, where several documents share a sample."""
AUXILIARY_LOSS = "auxiliary_loss"
"""The output of a model with what its loss has beside that of the scores, for each sample."""
FACTORS = "factors"
"""The attribute of an output that the loss has yet to multiply: the tensors that it multiplies it with."""
LOWER_IS_BETTER = ("loss", "error", "bits_per_token", "perplexity")
"""A metric whose name ends like this is best when it is smallest; any other when it is largest."""
STRUCTURE = re.compile(r"""[\[\]{}(),]|\A\s*(["']).*\1\s*\Z""", re.DOTALL)
"""Lists, mappings, functions, sweeps and text that is already quoted."""
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def parse_bytes(text: object) -> int:
    """The number of bytes that `11GiB`, `800MB` or `4096` stands for; ValueError unless it is positive."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    units = {name.lower(): size for name, size in BYTE_UNITS.items()}
    unit = units.get(match[2].lower() or "b") if match else None
    if match is None or unit is None or (count := int(float(match[1]) * unit)) < 1:
        raise ValueError("expected a number of bytes such as 11GiB, 800MB or 4096")
    return count


def format_bytes(count: float) -> str:
    """The count in the largest binary unit that fits, rounded up so that it still works as a limit."""
    name, unit = max(
        ((name, size) for name, size in BYTE_UNITS.items() if "i" in name and size <= count),
        key=lambda item: item[1],
        default=("B", 1),
    )
    return f"{math.ceil(100 * count / unit) / 100:g}{name}" if unit > 1 else f"{math.ceil(count)}B"


def exact_bytes(count: int) -> str:
    """The very number, with a unit if that is short: 80GiB, or 85899345921."""
    short = format_bytes(count)
    return short if parse_bytes(short) == count else str(count)


def parse_duration(text: str) -> float | None:
    """Seconds in `90`, `90s`, `30m`, `2h` or `1h30m`; None for anything else, and for zero."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    parts = zip(match.groups(), (3600.0, 60.0, 1.0), strict=True)
    return sum(float(number) * unit for number, unit in parts if number is not None) or None


def text_word(key: str, text: object) -> str:
    """The word that sets the key to this text, whatever characters it has, in quotes only if it needs them."""
    value = str(text)
    is_plain = value == value.strip() and not STRUCTURE.search(value) and "${" not in value
    return f"{key}={value if is_plain else quoted(escape_references(value))}"


def escape_references(text: str) -> str:
    """The text, written so that OmegaConf reads it as it is: a backslash makes plain text of a reference."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def quoted(text: str) -> str:
    """The text in quotes, as Hydra's grammar reads it."""
    # Inside quotes a backslash stands for itself unless a quote follows it.
    escaped = re.sub(r"(\\*)('|\Z)", lambda end: end[1] * 2 + (r"\'" if end[2] else ""), text)
    return f"'{escaped}'"


def lower_is_better(metric: str) -> bool:
    return metric.endswith(LOWER_IS_BETTER)


def check_whole_number(key: str, value: object, *, least: int) -> None:
    # bool is an int to Python, but `data.workers=true` is a mistake.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key}={value}: must be a whole number of at least {least}")


def check_fraction(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}={value}: must be from 0 to 1")


def flatten(node: Any, path: str = "", *, inner: bool = False) -> Iterator[tuple[str, Any]]:
    """The dotted key and the value of everything in a nested mapping that is not itself a mapping.

    inner: also yield each mapping and each element of a list, as `key[0]`.
    """
    is_mapping = isinstance(node, Mapping)
    if path and (inner or not is_mapping):
        yield path, node
    if is_mapping:
        for key, value in node.items():
            yield from flatten(value, f"{path}.{key}" if path else str(key), inner=inner)
    elif inner and isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from flatten(value, f"{path}[{index}]", inner=True)
