"""Two map-style datasets, torchvision's or custom ones, as one: the first to train on, the second held out."""

from __future__ import annotations

from typing import Any, Protocol, final

from PIL import Image
from torch import Tensor

from gpipe_cli.data.datasets import BatchedSamples, Data, Samples, check_size
from gpipe_cli.data.image_folder import center_crop, image_to_tensor
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.pytree import ModelInput, flatten, unflatten
from gpipe_cli.values import check_whole_number


class Dataset(Protocol):
    """A map-style dataset of images, tensors, or tuples or dicts of tensors, each with its target."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def build(
    train: Any,
    test: Any,
    classes: int,
    size: int | None = None,
) -> Data:
    check_size(size)
    check_whole_number("data.classes", classes, least=1)
    for key, dataset in (("train", train), ("test", test)):
        if key == "test" and dataset is None:
            continue
        if not hasattr(dataset, "__getitem__") or isinstance(dataset, dict | list | str):
            raise ConfigError(f"data.{key}: must be a dataset, {{_target_: ...}} with its arguments")
        if len(dataset) == 0:
            raise DataError(f"data.{key}: has no samples")
    samples = _samples(train, size)
    test_samples = None if test is None else _samples(test, size)
    first, *_ = flatten(samples[0][0], "input")[0]
    return Data(
        samples,
        test_samples,
        classes=classes,
        shape=tuple(first.shape),
        class_names=_class_names(train, classes),
    )


def _class_names(dataset: Any, classes: int) -> tuple[str, ...] | None:
    """What the datasets of torchvision have as their attribute `classes`."""
    names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple) or len(names) != classes:
        return None
    return tuple(names) if all(isinstance(name, str) for name in names) else None


def _samples(dataset: Any, size: int | None) -> Samples:
    """A dataset that loads batches itself does so, to pad samples to one length for example."""
    return dataset if size is None and isinstance(dataset, BatchedSamples) else PairSamples(dataset, size)


@final
class PairSamples:
    def __init__(self, dataset: Dataset, size: int | None) -> None:
        self._dataset, self._size = dataset, size
        self.targets = getattr(dataset, "targets", None)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[ModelInput, Tensor | int]:
        input, target = self._dataset[index]
        if isinstance(input, Image.Image):
            input = image_to_tensor(input)
        if self._size is None:
            return _checked(input), target
        if not isinstance(input, Tensor):
            raise DataError(
                f"returns a {type(input).__name__} as input, which data.size={self._size} cannot scale; "
                "remove data.size"
            )
        return center_crop(input, self._size), target


def _checked(input: Any) -> ModelInput:
    """Require a tensor, or a tuple or dict of tensors, which may have plain values beside them."""
    try:
        tensors, template = flatten(input, "input")
    except TypeError as error:
        raise DataError(str(error)) from error
    if not tensors:
        raise DataError(
            f"returns a {type(input).__name__} as input; it must return an image, a tensor, or a tuple or dict of "
            "tensors"
        )
    checked: ModelInput = unflatten(template, tensors)
    return checked
