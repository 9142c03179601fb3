"""What a model makes of held-out data, as its run saved it: the confusion matrix and some samples of a classifier, the
text of a language model. Images are nothing but PNG in the page itself, which a browser cannot run."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from gpipe_cli.runs.reader import as_int, as_list, as_number, as_rows, as_text

MAX_CLASSES = 100
"""The most classes of a matrix that is drawn."""
MAX_COUNT = 10**15
MAX_SAMPLES = 24
MAX_PAIRS = 30
MENTIONED_PAIRS = 5
LEVELS = 5
"""Shades of a cell."""
MAX_NAME = 40
PNG_PREFIX = "data:image/png;base64,"
MAX_URI = 2**17
"""Characters; an image of 96 x 96 random pixels has a third of that."""
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


class ConfusedPair(NamedTuple):
    target: int
    predicted: int
    times: int


@final
@dataclass(frozen=True)
class SamplePrediction:
    target: int | None
    predicted: int | None
    """None for a mask, which `masks` shows."""
    confidence: float | None
    image: str
    masks: tuple[str, ...]
    """Addresses of the images of the expected and the predicted mask."""
    text: str

    @property
    def images(self) -> dict[str, str]:
        """Name and address of each."""
        images = [("sample", self.image), *zip(("expected", "predicted"), self.masks, strict=False)]
        return {name: address for name, address in images if address}


@final
@dataclass(frozen=True)
class Predictions:
    """What one evaluation showed."""

    step: int
    unit: str
    """What was counted: samples or pixels."""
    names: Mapping[int, str]
    """The name of each class that has one."""
    counts: tuple[tuple[int, ...], ...]
    """By target and predicted class; empty if there are too many classes to draw."""
    pairs: tuple[ConfusedPair, ...]
    """The most confused ones, most first."""
    samples: tuple[SamplePrediction, ...]

    @property
    def mentioned_pairs(self) -> tuple[ConfusedPair, ...]:
        return self.pairs[:MENTIONED_PAIRS]

    def name(self, label: int) -> str:
        return self.names.get(label) or str(label)

    def shade(self, target: int, predicted: int) -> str:
        """The CSS class of a cell that is not 0: the darker, the larger its share of the row."""
        counts = self.counts[target]
        share = counts[predicted] / sum(counts)
        if target == predicted:
            return f"hit{max(1, round(LEVELS * share))}"
        return f"miss{max(1, round(LEVELS * share**0.5))}"


def read_predictions(content: Mapping[str, Any]) -> Predictions | None:
    """From the content of predictions.json; None if there is nothing in it that can be shown."""
    counts = _matrix(content.get("counts"))
    names = {
        index: as_text(name)[:MAX_NAME] for index, name in enumerate(as_list(content.get("class_names")))
    }
    pairs = (
        [
            ConfusedPair(target, predicted, count)
            for target, row in enumerate(counts)
            for predicted, count in enumerate(row)
            if count and target != predicted
        ]
        if counts
        else [pair for row in as_rows(content.get("pairs")) if (pair := _pair(row)) is not None]
    )
    samples = [_sample(row) for row in as_rows(content.get("samples"))[:MAX_SAMPLES]]
    shown = tuple(sample for sample in samples if sample.image or sample.text)
    if not (counts or pairs or shown):
        return None
    most = sorted(pairs, key=lambda pair: -pair.times)[:MAX_PAIRS]
    step = as_int(content.get("step"), MAX_COUNT) or 0
    unit = "pixels" if content.get("unit") == "pixels" else "samples"
    return Predictions(step, unit, names, counts, tuple(most), shown)


def read_text_sample(content: Mapping[str, Any]) -> dict[str, str]:
    """`prompt`, `text` and how it was drawn (`origin`), from the content of sample.json; empty without text."""
    text = as_text(content.get("text"))
    if not text:
        return {}
    settings = [
        f"{name}={number:g}"
        for name in ("temperature", "top_k", "seed")
        if (number := as_number(content.get(name))) is not None
    ]
    tokens = as_int(content.get("tokens"), MAX_COUNT)
    count = [] if tokens is None else [f"{tokens} tokens"]
    return {"prompt": as_text(content.get("prompt")), "text": text, "origin": ", ".join([*count, *settings])}


def _matrix(value: Any) -> tuple[tuple[int, ...], ...]:
    rows = as_list(value)
    size = len(rows)
    if not 2 <= size <= MAX_CLASSES or not all(isinstance(row, list) and len(row) == size for row in rows):
        return ()
    return tuple(tuple(as_int(count, MAX_COUNT) or 0 for count in row) for row in rows)


def _pair(row: Mapping[str, Any]) -> ConfusedPair | None:
    target, predicted, count = (as_int(row.get(key), MAX_COUNT) for key in ("target", "predicted", "count"))
    if target is None or predicted is None or count is None:
        return None
    return ConfusedPair(target, predicted, count)


def _sample(row: Mapping[str, Any]) -> SamplePrediction:
    masks = tuple(as_png_uri(row.get(f"{name}_image")) for name in ("target", "predicted"))
    return SamplePrediction(
        as_int(row.get("target"), MAX_COUNT),
        as_int(row.get("predicted"), MAX_COUNT),
        as_number(row.get("confidence")),
        as_png_uri(row.get("image")),
        masks if all(masks) else (),
        as_text(row.get("text")),
    )


def png_uri(pixels: bytes, width: int, height: int) -> str:
    """The address of an image; pixels: red, green and blue, row by row."""
    from PIL import Image  # not needed to read a page's data

    content = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(content, "PNG", optimize=True)
    return PNG_PREFIX + base64.b64encode(content.getvalue()).decode()


def as_png_uri(value: object) -> str:
    """The address if it is one that `png_uri` could have made, else an empty text."""
    if not isinstance(value, str) or len(value) > MAX_URI or not value.startswith(PNG_PREFIX):
        return ""
    return value if BASE64.fullmatch(value, len(PNG_PREFIX)) else ""
