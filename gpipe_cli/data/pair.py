"""Two map-style datasets, of torchvision or your own, as one: the first to train on, the second held out."""

from __future__ import annotations

from typing import Any, Protocol, final

from PIL import Image
from torch import Tensor

from gpipe_cli.data.datasets import Data, check_common_keys
from gpipe_cli.data.image_folder import center_crop, image_to_tensor
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.values import check_whole_number


class Dataset(Protocol):
    """A map-style dataset of images or tensors, each with its class."""

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
    samples = PairSamples(train, size)
    shape = tuple(samples[0][0].shape)
    test_samples = PairSamples(test, size)
    return Data(samples, test_samples, classes=classes, shape=shape, workers=workers, timeout=timeout)


@final
class PairSamples:
    def __init__(self, dataset: Dataset, size: int | None) -> None:
        self._dataset, self._size = dataset, size

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor | int]:
        input, target = self._dataset[index]
        if isinstance(input, Image.Image):
            input = image_to_tensor(input)
        if not isinstance(input, Tensor):
            raise DataError(f"returns a {type(input).__name__} as input; it must return an image or a tensor")
        return (input if self._size is None else center_crop(input, self._size)), target
