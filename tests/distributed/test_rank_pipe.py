from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli.distributed.groups import RankCoords
from gpipe_cli.distributed.rank_pipe import keep_only, rank_pipe
from gpipe_cli.pipeline.pipe import Pipe

CPU = torch.device("cpu")


@pytest.mark.parametrize("replaces", [False, True])
def test_a_rank_keeps_its_layers_and_all_ties(replaces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch replaces a parameter to move it, as on PrivateUse1 devices, the copies of a tie trained apart."""
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", replaces)
    layers = [nn.Linear(2, 2) for _ in range(4)]
    layers[3].weight = layers[0].weight  # between ranks
    layers[2].weight = layers[1].weight  # among layers of other ranks
    layers[1].register_buffer("shared", torch.ones(2))
    layers[0].register_buffer("shared", layers[1].shared)  # type: ignore[arg-type]
    keep_only(nn.Sequential(*layers), layers[:1], CPU)
    assert layers[0].weight is layers[3].weight and layers[0].weight.device == CPU
    assert layers[0].shared is layers[1].shared and layers[0].shared.device == CPU
    assert layers[1].weight is layers[2].weight and layers[1].weight.is_meta
    assert not layers[0].bias.is_meta and layers[3].bias.is_meta
    assert isinstance(layers[1].weight, nn.Parameter)


def second_of_two_ranks() -> Pipe:
    """It has two of four partitions."""
    coords = RankCoords(None, None, CPU, workers=(0, 1, 0, 1), rank=1, ranks=2, replica=0, replicas=1)
    return rank_pipe(
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))),
        [1] * 4,
        coords,
        chunks=2,
        checkpoint="never",
        schedule="interleaved",
        deferred_batch_norm=False,
    )


def test_a_rank_names_only_its_own_partitions() -> None:
    """A rank that ran out of memory in its update used to name all partitions of the model."""
    assert second_of_two_ranks().partition_devices == {1: CPU, 3: CPU}


def test_a_rank_that_cannot_move_its_partitions_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(module: nn.Module, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(nn.Module, "to", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        second_of_two_ranks()
    assert caught.value.__notes__ == ["while moving partitions 1, 3"]
