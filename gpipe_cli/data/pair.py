"""Two datasets of torchvision, or of your own, put together: one to train on, one held out.

Decides how their samples become tensors. The datasets themselves are named in the configuration.
"""

from __future__ import annotations

from typing import Any, Protocol, final

from PIL import Image
from torch import Tensor

from gpipe_cli.data.datasets import Data
from gpipe_cli.data.image_folder import middle_square, pixels
from gpipe_cli.data.keys import check_common_keys
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.values import check_whole_number


class Dataset(Protocol):
    """A map-style dataset: images or tensors, each with its class."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def build(
    train: Any,
    test: Any,
    classes: int,
    size: int | None = None,
    workers: int = 0,
    timeout: float | None = None,
) -> Data:
    check_common_keys(size, workers, timeout)
    check_whole_number("data.classes", classes, least=1)
    for key, dataset in (("train", train), ("test", test)):
        if not hasattr(dataset, "__getitem__") or isinstance(dataset, dict | list | str):
            raise ConfigError(f"data.{key}: must be a dataset, {{_target_: ...}} with its arguments")
        if len(dataset) == 0:
            raise DataError(f"data.{key}: has no samples")
    first = PairSamples(train, size)
    shape = tuple(first[0][0].shape)
    return Data(
        first,
        PairSamples(test, size),
        classes=classes,
        shape=shape,
        flips=False,
        workers=workers,
        timeout=timeout,
    )


@final
class PairSamples:
    def __init__(self, dataset: Dataset, size: int | None) -> None:
        self._dataset, self._size = dataset, size

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor | int]:
        input, target = self._dataset[index]
        if isinstance(input, Image.Image):
            input = pixels(input)
        if not isinstance(input, Tensor):
            raise DataError(f"gives a {type(input).__name__}; an image or a tensor is needed")
        return (input if self._size is None else middle_square(input, self._size)), target
