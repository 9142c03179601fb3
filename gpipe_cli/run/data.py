"""Where the mini-batches of a run come from: the data chosen, in the order the seed decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

from gpipe_cli.config.schema import ModelConfig, RunConfig, TrainConfig
from gpipe_cli.config.targets import instantiate
from gpipe_cli.data.datasets import Data, Samples
from gpipe_cli.data.loading import batch_count, batches, check_batch, check_labels
from gpipe_cli.data.transforms import Transform, Transforms
from gpipe_cli.distributed.team import Team
from gpipe_cli.engines.memory import memory_watched
from gpipe_cli.engines.protocol import Batch
from gpipe_cli.errors import ConfigError, DataError


@final
@dataclass(frozen=True)
class Feed:
    data: Data
    transforms: Transforms
    classes: int
    """How many the model tells apart: its own key, else as many as the data has."""
    batch_size: int
    """Of all replicas together."""
    seed: int
    replica: int = 0
    replicas: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return batch_count(len(self.data.train), self.batch_size)

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The training samples as this epoch shuffles them, from one of its mini-batches on."""
        return self._batches(self.data.train, self.transforms.train, epoch, shuffle=True, start=start)

    def test(self, epoch: int = 0) -> Iterator[Batch]:
        """The held-out samples, first to last."""
        return self.ordered("test")

    def ordered(self, split: str) -> Iterator[Batch]:
        """All samples of a split once, first to last, none of them changed at random."""
        samples = self.data.train if split == "train" else self.data.test
        return self._batches(samples, self.transforms.test, epoch=0, shuffle=False)

    def micro_batch(self, chunks: int) -> Batch:
        """One micro-batch, to measure with: as many rows as the largest of a mini-batch has."""
        rows = min(len(self.data.train), -(-self.batch_size // (chunks * self.replicas)))
        return next(replace(self, batch_size=rows, replica=0, replicas=1).ordered("train"))

    def samples_after(self, steps: int) -> int:
        """How many training samples that many steps have seen."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * len(self.data.train) + rest * self.batch_size

    def _batches(
        self, samples: Samples, transform: Transform | None, epoch: int, *, shuffle: bool, start: int = 0
    ) -> Iterator[Batch]:
        for input, target in batches(
            samples,
            batch_size=self.batch_size,
            seed=self.seed,
            epoch=epoch,
            start=start,
            shuffle=shuffle,
            workers=self.data.workers,
            timeout=self.data.timeout,
            transform=transform,
            replica=self.replica,
            replicas=self.replicas,
        ):
            check_batch(input, target)
            if not target.is_floating_point():
                check_labels(target, self.classes)
            yield input, target


@memory_watched(
    "loading the data", "choose a smaller data set, or samples that are read from files one by one"
)
def make_feed(settings: ModelConfig) -> Feed:
    data = instantiate(settings.data, "data", settings.allow)
    if not isinstance(data, Data):
        raise ConfigError(
            f"data._target_={settings.data['_target_']}: must give a gpipe_cli.data.datasets.Data, "
            f"gives a {type(data).__name__}"
        )
    for split, samples in (("train", data.train), ("test", data.test)):
        if len(samples) == 0:
            raise DataError(f"data._target_={settings.data['_target_']}: has no samples to {split} on")
    transforms = instantiate(settings.transform, "transform", settings.allow, data=data)
    classes = settings.model.get("num_classes") or data.classes
    seed = settings.seed if isinstance(settings, TrainConfig) else 0
    replicas = settings.data_parallel if isinstance(settings, RunConfig) else 1
    return Feed(data, transforms, classes, settings.batch_size, seed, _replica(replicas), replicas)


def _replica(replicas: int) -> int:
    """Of this process: as the mesh of `data` and `pipe` has it, one replica after another."""
    team = Team.present()
    return team.rank // max(1, team.size // replicas)
