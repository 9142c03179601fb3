"""The batches that a run measures and traces with."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import torch
from torch import Tensor

from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.data.datasets import Data, ImageSamples
from gpipe_cli.data.transforms import Transforms


class Words:
    """Inputs of different lengths, padded to the longest of a batch."""

    lengths = (2, 3, 6, 1, 4)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
        return {"ids": torch.full((self.lengths[index],), index)}, index

    def batch(self, indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows = [self[index][0]["ids"] for index in indices.tolist()]
        return {"ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)}, indices


def loader(longest: int, batch_size: int = 4, replicas: int = 1) -> BatchLoader:
    data = Data(Words(), Words(), classes=5, shape=(6,), longest=longest)
    return BatchLoader(data, Transforms(None, None), 5, batch_size, seed=0, replicas=replicas)


def test_what_is_measured_is_as_long_as_the_longest_sample() -> None:
    input, target = loader(longest=2).micro_batch(chunks=2)
    assert isinstance(input, dict) and target.tolist() == [2, 0]
    assert input["ids"].tolist() == [[2] * 6, [0, 0, -1, -1, -1, -1]]


def test_what_is_measured_has_the_rows_of_the_largest_micro_batch() -> None:
    assert [len(loader(0, 5).micro_batch(chunks)[1]) for chunks in (1, 2, 3, 5, 9)] == [5, 3, 2, 1, 1]
    assert loader(0, 5).micro_batch(2)[1].tolist() == [0, 1, 2]
    assert loader(4, 5).micro_batch(1)[1].tolist() == [4, 0, 1, 2, 3]
    assert len(loader(0, 5, replicas=2).micro_batch(2)[1]) == 2
    assert len(loader(0, 100).micro_batch(1)[1]) == 5, "not more than there are samples"
    assert len(loader(0, 100).micro_batch(2)[1]) == 3, "of a mini-batch that has all samples"
    assert loader(2).measured_batch(7)[1].tolist() == [2, 0, 1, 3, 4, 2, 0], "for a plan they repeat"


def test_a_part_of_the_evaluation_is_the_same_for_every_replica_and_has_all_classes() -> None:
    samples = ImageSamples(torch.zeros(50, 1, 2, 2, dtype=torch.uint8), torch.arange(50) // 10)
    data = Data(samples, samples, classes=5, shape=(3, 2, 2))

    def part(most: int | None, seed: int = 0, replicas: int = 1) -> list[list[int]]:
        parts = (
            BatchLoader(data, Transforms(None, None), 5, 10, seed, replica, replicas, most_eval_batches=most)
            for replica in range(replicas)
        )
        return [torch.cat([target for _, target in each.test()]).tolist() for each in parts]

    (two,) = part(2)
    assert Counter(two) == dict.fromkeys(range(5), 4) and part(2) == [two]
    assert sorted(chain(*part(2, replicas=2))) == two
    loaders = [BatchLoader(data, Transforms(None, None), 5, 10, seed, most_eval_batches=2) for seed in (0, 1)]
    assert loaders[0].eval_batches == 2 and len(loaders[0].eval_samples) == 20
    inputs = [each.eval_samples._indices.tolist() for each in loaders]  # type: ignore[attr-defined]
    assert inputs[0] != inputs[1], "the seed chooses"
    assert len(part(9)[0]) == len(part(None)[0]) == 50
    assert len(list(loaders[0].in_order("test"))) == 5, "gpipe eval evaluates all"


def test_a_model_is_traced_with_two_rows_of_the_kind_that_the_data_has() -> None:
    input = loader(longest=2).traced_batch()
    assert isinstance(input, dict) and input["ids"].tolist() == [[2] * 6, [0, 0, -1, -1, -1, -1]]
    same = loader(longest=0).traced_batch()
    assert isinstance(same, dict) and same["ids"].tolist() == [[0, 0], [0, 0]]
