"""The confusion matrix of a classifier and samples of its predictions, for the page: what log.predictions=true adds.

The process with the last layer counts while the model is evaluated; rank 0 adds the inputs of the samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.distributed.world import World
from gpipe_cli.losses.measures import are_pixel_scores, main_scores
from gpipe_cli.report.colors import CURVES
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import print_status
from gpipe_cli.report.page.predictions import png_uri

MAX_CLASSES = 1000
"""Counting pairs of more classes would take noticeable time and memory."""
MAX_MATRIX = 100
"""Classes of which every pair is written; of more, only the most confused ones."""
MAX_PAIRS = 30
MAX_SHOWN = 12
MAX_WRONG = 6
MAX_MASKS = 4
MAX_CHARACTERS = 400
THUMBNAIL = 96
"""Pixels of the longer side of an image."""


@final
@dataclass(frozen=True)
class Observed:
    """One evaluation of a classifier."""

    counts: Tensor
    """[target class, predicted class]: how many samples, or pixels."""
    samples: Sequence[Mapping[str, Any]]
    """Those to show: `index`, and `target` and `predicted`, each a class or a mask, with a class's `confidence`."""


@final
class EvalObserver:
    """Counts predictions while the model is evaluated."""

    def __init__(self, loader: BatchLoader) -> None:
        # Later replicas evaluate other samples than the first ones.
        self._wants_samples = loader.replica == 0
        self._is_text = loader.data.tokenizer is not None
        self._batch_size, self._first = loader.batch_size, 0
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._samples: list[dict[str, Any]] = []
        self._failed = False

    def __call__(self, output: Any, target: Tensor) -> None:
        """Count one mini-batch. It never fails: an output that is no class score is not counted."""
        if self._failed:
            return
        try:
            self._count(output, target)
        except Exception as error:  # noqa: BLE001 - a page must not end a training
            self._failed = True
            print_status(f"warning: predictions are not counted: {describe(error)}")

    def _count(self, output: Any, target: Tensor) -> None:
        scores = main_scores(output)
        first, self._first = self._first, self._first + self._batch_size
        # One label per token is not a class: the tokens of a language model have their own metrics.
        if not are_pixel_scores(scores, target) or (self._is_text and target.ndim > 1):
            return
        classes = scores.shape[1]
        if not 2 <= classes <= MAX_CLASSES:
            return
        # Not argmax, which takes five times as long for the scores of pixels.
        predicted, target = scores.max(1).indices.cpu(), target.cpu()
        if not len(self._counts):
            self._counts = torch.zeros(classes**2 + 1, dtype=torch.int64)
        if self._wants_samples and (target.ndim == 1 or not self._samples):
            self._samples = _chosen([*self._samples, *_samples(scores, predicted, target, first)])
        # The loss has checked the labels: what is below 0 is ignored, and goes into a last place of its own.
        pairs = torch.where(target < 0, classes**2, classes * target + predicted).flatten()
        self._counts.scatter_add_(0, pairs, torch.ones_like(pairs))

    def take(self, world: World) -> Observed | None:
        """What was counted since the last call, over all ranks, which call it together; None if nothing was."""
        counts = world.sum(self._counts[:-1])
        # One rank has them: the one with the output of the first replica.
        samples: list[dict[str, Any]] = next(filter(None, world.run_together(lambda: self._samples)), [])
        self._counts, self._samples, self._first = torch.zeros(0, dtype=torch.int64), [], 0
        if not len(counts):
            return None
        return Observed(counts.reshape(math.isqrt(len(counts)), -1), samples)


def _samples(scores: Tensor, predicted: Tensor, target: Tensor, first: int) -> list[dict[str, Any]]:
    """The samples of a mini-batch, of which `first` is the index of the first one."""
    if target.ndim == 3:
        masks = zip(_thumbnail(target[:MAX_MASKS]), _thumbnail(predicted[:MAX_MASKS]), strict=True)
        return [
            {"index": first + row, "target": mask.tolist(), "predicted": own.tolist()}
            for row, (mask, own) in enumerate(masks)
        ]
    if target.ndim != 1:
        return []
    confidence = scores.float().softmax(1).amax(1).cpu()
    rows = zip(target.tolist(), predicted.tolist(), confidence.tolist(), strict=True)
    return [
        {"index": first + row, "target": label, "predicted": own, "confidence": share}
        for row, (label, own, share) in enumerate(rows)
        if label >= 0
    ]


def _chosen(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples worth showing: errors, then others, each across the classes and the most confident ones first.

    What is not chosen among some samples is not chosen among more, so an evaluation need not keep all.
    """
    if not all("confidence" in sample for sample in samples):
        return samples  # no mask is predicted exactly
    is_wrong = [sample["target"] != sample["predicted"] for sample in samples]
    wrong, right = (
        _across_classes([sample for sample, own in zip(samples, is_wrong, strict=True) if own is kind])
        for kind in (True, False)
    )
    return [*wrong[:MAX_WRONG], *right[:MAX_SHOWN]]


def _across_classes(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One sample of each class, then a second of each: of a class, the most confident ones first."""
    places = Counter[int]()
    order: list[tuple[int, dict[str, Any]]] = []
    for sample in sorted(samples, key=lambda sample: -sample["confidence"]):
        order.append((places[sample["target"]], sample))
        places[sample["target"]] += 1
    return [sample for _, sample in sorted(order, key=lambda pair: pair[0])]


def _thumbnail(images: Tensor) -> Tensor:
    """Images or masks [..., height, width], made smaller if they are large."""
    stride = math.ceil(max(images.shape[-2:]) / THUMBNAIL)
    return images[..., ::stride, ::stride]


def predictions_json(observed: Observed, loader: BatchLoader, step: int) -> dict[str, Any]:
    """The content of predictions.json."""
    classes, names = len(observed.counts), loader.data.class_names
    has_masks = any("confidence" not in sample for sample in observed.samples)
    content: dict[str, Any] = {"step": step, "classes": classes, "unit": "pixels" if has_masks else "samples"}
    if names is not None and len(names) == classes:
        content["class_names"] = list(names)
    if classes <= MAX_MATRIX:
        content["counts"] = observed.counts.tolist()
    else:
        content["pairs"] = _most_confused(observed.counts)
    return {**content, "samples": _shown_samples(observed.samples, loader)}


def _most_confused(counts: Tensor) -> list[dict[str, int]]:
    wrong = counts.clone().fill_diagonal_(0).flatten()
    most = wrong.topk(min(MAX_PAIRS, len(wrong)))
    return [
        {"target": index // len(counts), "predicted": index % len(counts), "count": count}
        for index, count in zip(most.indices.tolist(), most.values.tolist(), strict=True)
        if count
    ]


def _shown_samples(samples: Sequence[Mapping[str, Any]], loader: BatchLoader) -> list[dict[str, Any]]:
    """The samples, each with its input; none if inputs cannot be shown."""
    rows = []
    for sample in samples[:MAX_SHOWN]:
        input = loader.eval_samples[sample["index"]][0]
        if isinstance(input, dict) and "input_ids" in input:  # a text with a label, and its padding
            input = input["input_ids"][input["attention_mask"] > 0]
        picture = _picture(input, loader) if isinstance(input, Tensor) else None
        if picture is not None:
            rows.append({**_with_mask_images(sample), **picture})
    return rows


def _picture(input: Tensor, loader: BatchLoader) -> dict[str, str] | None:
    if loader.data.tokenizer is not None:
        return {"text": loader.data.tokenizer.decode(input.tolist())[:MAX_CHARACTERS]}
    if input.ndim != 3 or input.shape[0] not in (1, 3):
        return None
    image = input.float()
    low, high = float(image.min()), float(image.max())
    if low < 0 or high > 1:  # not an image with values from 0 to 1: show it with full contrast
        image = (image - low) / max(high - low, 1e-12)
    size = max(image.shape[1:])
    if size > THUMBNAIL:
        image = interpolate(image[None], scale_factor=THUMBNAIL / size, mode="area")[0]
    return {"image": _png((255 * image).round().to(torch.uint8).expand(3, -1, -1))}


def _with_mask_images(sample: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(sample["target"], int):
        return dict(sample)
    return {
        f"{name}_image": _png(_mask_colors(torch.tensor(sample[name]))) for name in ("target", "predicted")
    }


def _mask_colors(mask: Tensor) -> Tensor:
    """[3, height, width]: class 0 and pixels without a label are gray, since the background is mostly one of them."""
    palette = torch.tensor(
        [(60, 64, 70), *(tuple(bytes.fromhex(color.light[1:])) for color in CURVES)], dtype=torch.uint8
    )
    colors = mask.clamp(min=0)
    return palette[torch.where(colors == 0, 0, (colors - 1) % len(CURVES) + 1)].movedim(-1, 0)


def _png(pixels: Tensor) -> str:
    """pixels: uint8 [3, height, width]."""
    _, height, width = pixels.shape
    return png_uri(bytes(pixels.movedim(0, -1).contiguous().flatten().tolist()), width, height)
