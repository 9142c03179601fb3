"""The mini-batches of a run: the configured data, in the order that the seed decides."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.accelerator.devices import available_devices, reads_pinned_memory
from gpipe_cli.activity import activity
from gpipe_cli.config.instantiate import accepted_arguments, instantiate, kept_keys
from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.config.targets import current_name
from gpipe_cli.data.datasets import (
    Data,
    Samples,
    across_classes,
    class_labels,
    generator_for,
    hold_out,
    subset,
)
from gpipe_cli.data.loading import BatchFetcher, BatchRequest, batch_count, batches, check_batch, check_labels
from gpipe_cli.data.transforms import Transform, Transforms
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Batch
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.losses.measures import predicts_numbers
from gpipe_cli.pipeline.microbatch import micro_batches
from gpipe_cli.pytree import ModelInput
from gpipe_cli.values import AUTO, check_whole_number

OWN_KEYS: Mapping[str, Any] = {
    "validation": float | None,
    "stratify": bool,
    "drop_last": bool,
    "workers": int,
    "timeout": float | None,
}
"""Keys of every dataset that gpipe uses itself, and their types."""


@final
@dataclass(frozen=True)
class BatchLoader:
    data: Data
    transforms: Transforms
    classes: int
    """How many classes the model distinguishes: its own key, else as many as the data has."""
    batch_size: int
    """Samples in a mini-batch of all replicas together."""
    seed: int
    replica: int = 0
    replicas: int = 1
    pin_memory: bool = False
    drop_last: bool = False
    """Whether an epoch leaves out the samples that do not fill a mini-batch."""
    least_rows: int = 1
    """Rows of the smallest micro-batch that the model accepts in training."""
    validation: Samples | None = None
    """What training evaluates on instead of the test set."""
    most_eval_batches: int | None = None
    """How many mini-batches an evaluation during training has at most; None: those of all samples."""
    notes: tuple[str, ...] = ()
    """What a user should know about samples and batches, a line each."""
    model_input: Callable[[ModelInput, Tensor], ModelInput] | None = None
    """Makes the input of a model that takes the targets too; None: it takes the inputs of the data."""

    @property
    def steps_per_epoch(self) -> int:
        return batch_count(len(self.data.train), self.batch_size, drop_last=self.drop_last)

    def micro_batches(self, chunks: int) -> int:
        """How many micro-batches a replica makes of a whole mini-batch."""
        return len(micro_batches(-(-self.batch_size // self.replicas), chunks, self.least_rows))

    @cached_property
    def eval_samples(self) -> Samples:
        """What training evaluates on: all of them, or a part that the seed chooses across all classes."""
        samples = self.data.test if self.validation is None else self.validation
        assert samples is not None, "data without a test set is divided"
        count = len(samples) if self.most_eval_batches is None else self.most_eval_batches * self.batch_size
        if count >= len(samples):
            return samples
        order = torch.randperm(len(samples), generator=generator_for(self.seed, "evaluation"))
        return subset(samples, across_classes(order, class_labels(samples))[:count].sort().values)

    @property
    def eval_batches(self) -> int:
        return batch_count(len(self.eval_samples), self.batch_size)

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The training samples in the shuffled order of this epoch, beginning with mini-batch `start`."""
        return self._batches(
            self.data.train,
            self.transforms.train,
            epoch,
            shuffle=True,
            start=start,
            drop_last=self.drop_last,
        )

    def test(self, epoch: int = 0) -> Iterator[Batch]:
        """The samples that training evaluates on, in order; they are the same in every epoch."""
        return self._batches(self.eval_samples, self.transforms.test, epoch=0, shuffle=False)

    def in_order(self, split: str) -> Iterator[Batch]:
        """All samples of a split once, in order, without random transforms."""
        samples = {"train": self.data.train, "test": self.data.test, "validation": self.validation}[split]
        if samples is None:
            raise ConfigError(f"split={split}: data.validation holds out no samples; choose test or train")
        return self._batches(samples, self.transforms.test, epoch=0, shuffle=False)

    def micro_batch(self, chunks: int) -> Batch:
        """A micro-batch to measure with: it has as many rows as the largest one of a mini-batch, and is as long."""
        batch_size = min(self.batch_size, len(self.data.train))
        return self.measured_batch(max(self.least_rows, -(-batch_size // (chunks * self.replicas))))

    def measured_batch(self, rows: int) -> Batch:
        """The longest training sample and then the first ones; they repeat if there are too few."""
        longest = self.data.longest
        places = (row % len(self.data.train) for row in range(rows))
        return self._checked(
            self._fetch([place - 1 + (place > longest) if place else longest for place in places])
        )

    def traced_batch(self) -> ModelInput:
        """The input of a mini-batch to trace a model with: the longest training sample and the first.

        Two rows, because batch norm in training mode rejects a batch of one. Lengths that differ make data pad the
        shorter one, and a model may treat an input without padding differently.
        """
        return self.traced_samples()[0]

    def traced_samples(self) -> Batch:
        return self._fetch([self.data.longest, 0])

    def samples_after(self, steps: int) -> int:
        """How many training samples that many steps have used."""
        epochs, remaining_steps = divmod(steps, self.steps_per_epoch)
        whole = self.steps_per_epoch * self.batch_size
        return epochs * min(len(self.data.train), whole) + remaining_steps * self.batch_size

    def _fetch(self, indices: list[int]) -> Batch:
        """Training samples as a batch, without random transforms."""
        fetch = BatchFetcher(self.data.train, self.transforms.test, self.seed)
        return self._for_model(fetch(BatchRequest(epoch=0, indices=indices)))

    def _for_model(self, batch: Batch) -> Batch:
        return batch if self.model_input is None else (self.model_input(*batch), batch[1])

    def _checked(self, batch: Batch) -> Batch:
        input, target = batch
        check_batch(input, target)
        if not target.is_floating_point():
            check_labels(target, self.classes)
        return batch

    def _batches(
        self,
        samples: Samples,
        transform: Transform | None,
        epoch: int,
        *,
        shuffle: bool,
        start: int = 0,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        for batch in batches(
            samples,
            batch_size=self.batch_size,
            seed=self.seed,
            epoch=epoch,
            start=start,
            shuffle=shuffle,
            workers=self.data.workers,
            timeout=self.data.timeout,
            transform=transform,
            drop_last=drop_last,
            replica=self.replica,
            replicas=self.replicas,
            pin_memory=self.pin_memory,
        ):
            yield self._for_model(self._checked(batch))


@report_out_of_memory(
    "loading the data", "choose a smaller data set, or one that reads its samples from files"
)
def make_loader(settings: ModelConfig, data: Data | None = None) -> BatchLoader:
    """data: used instead of the configured one, and not divided."""
    activity.now("reading the data")
    keys, numbers = {}, None
    loss = instantiate(settings.loss, "loss", settings.allow) if settings.loss else None
    if data is None:
        keys = own_keys(settings)
        numbers = predicts_numbers(loss)
        data = instantiate(data_arguments(settings), "data", settings.allow)
    if not isinstance(data, Data):
        raise ConfigError(
            f"data._target_={settings.data['_target_']}: returns a {type(data).__name__}; "
            "it must return a gpipe_cli.data.datasets.Data"
        )
    for split, samples in (("train", data.train), ("test", data.test)):
        if samples is not None and len(samples) == 0:
            raise DataError(f"data._target_={settings.data['_target_']}: has no samples to {split} on")
    # The seed of gpipe generate is one of sampling, not that of its run.
    seed = settings.seed if settings.uses_loss else 0
    divided = hold_out(data, keys.get("validation"), seed, stratify=keys.get("stratify", True))
    loading = {key: keys[key] for key in ("workers", "timeout") if key in keys}
    data = replace(_normalized_for_model(settings, divided.data), **loading)
    transforms = instantiate(settings.transform, "transform", settings.allow, data=data)
    classes = settings.model.get("num_classes") or data.classes
    if numbers is False and classes < data.classes:
        raise DataError(
            f"model.num_classes={classes}: labels are out of range, because the data has {data.classes} classes; "
            "remove it, or give at least as many"
        )
    # The planner divides a mini-batch among the replicas that it estimates itself.
    replicas = 1 if settings.plans else settings.data_parallel
    world = World.current()
    replica = world.rank // max(1, world.size // replicas)  # ranks of one replica are consecutive
    pin_memory = settings.runs_steps and reads_pinned_memory(available_devices(settings.devices))
    return BatchLoader(
        data,
        transforms,
        classes,
        settings.batch_size,
        seed,
        replica,
        replicas,
        pin_memory,
        drop_last=_drop_last(settings, keys, data),
        validation=divided.validation,
        most_eval_batches=settings.eval.batches,
        notes=data.notes if divided.note is None else (*data.notes, divided.note),
        model_input=getattr(loss, "model_input", None),
    )


def data_arguments(settings: ModelConfig) -> dict[str, Any]:
    """The `data` node without the keys that gpipe uses itself, and with the tokenizer that `auto` stands for."""
    own = own_keys(settings)
    node = {key: value for key, value in settings.data.items() if key not in own}
    if node.get("tokenizer") == AUTO and str(current_name(node["_target_"])).startswith("gpipe_cli."):
        node["tokenizer"] = _declared_by_model(settings, "own_tokenizer")
    return node


def own_keys(settings: ModelConfig) -> dict[str, Any]:
    """The keys of the data that gpipe uses itself, because the target does not take them."""
    keys = kept_keys(settings.data, "data", settings.allow, OWN_KEYS)
    workers, timeout = keys.get("workers", 0), keys.get("timeout")
    check_whole_number("data.workers", workers, least=0)
    if timeout is not None and not 0 < timeout < math.inf:  # also false for nan
        raise ConfigError(f"data.timeout={timeout}: must be a positive number of seconds")
    if timeout is not None and not workers:
        raise ConfigError(f"data.timeout={timeout}: has no effect with data.workers=0; set data.workers too")
    return keys


def _drop_last(settings: ModelConfig, keys: Mapping[str, Any], data: Data) -> bool:
    # A command that does not train leaves nothing out.
    drops = bool(keys.get("drop_last", False)) and bool(settings.optimizer)
    if drops and len(data.train) < settings.batch_size:
        raise ConfigError(
            f"data.drop_last=true: leaves nothing, because {len(data.train)} samples fill no mini-batch of "
            f"batch_size={settings.batch_size}; give a smaller batch_size"
        )
    return drops


def _declared_by_model(settings: ModelConfig, name: str) -> Any:
    """What the function of this name, next to the one that builds the model, returns; None if there is none."""
    accepted_arguments(settings.model, "model", settings.allow)  # imports the target if it is allowed
    target = str(current_name(settings.model["_target_"]))
    module = sys.modules.get(target.rpartition(".")[0])  # None: a method of a class
    declared = getattr(module, name, None)
    return declared(settings.model) if callable(declared) else None


def _normalized_for_model(settings: ModelConfig, data: Data) -> Data:
    """The data with the mean and std that the model's own configuration has for its inputs, if it has any."""
    stats = _declared_by_model(settings, "normalization") if len(data.shape) == 3 else None
    if stats is None or len(stats[0]) != data.shape[0]:
        return data
    return replace(data, mean=stats[0], std=stats[1])
