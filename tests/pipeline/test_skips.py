"""Skips between partitions of a pipe, and skips in a dictionary by current_microbatch()."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe, current_microbatch, is_recomputing
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.skip import pop, skippable, stash

MODES = ["always", "except_last", "never"]


@skippable(stash=["a"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, input: Tensor):
        hidden = self.linear(input)
        yield stash("a", hidden.sin())
        return hidden


@skippable(pop=["a"])
class Pop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, input: Tensor):
        skip = yield pop("a")
        return self.linear(input) if skip is None else self.linear(input) * skip


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("training", [True, False])
def test_a_skip_is_freed_after_its_last_use(checkpoint: str, training: bool) -> None:
    references: list[weakref.ref[Tensor]] = []

    @skippable(stash=["big"])
    class StashBig(nn.Module):
        def forward(self, input: Tensor):
            big = input + 1
            references.append(weakref.ref(big))
            yield stash("big", big)
            return input * 1

    @skippable(pop=["big"])
    class PopBig(nn.Module):
        def forward(self, input: Tensor):
            big = yield pop("big")
            references.append(weakref.ref(big))
            return input + big

    model = nn.Sequential(StashBig(), nn.Identity(), PopBig())
    with GPipe(model, [1, 1, 1], chunks=2, checkpoint=checkpoint) as pipe, torch.set_grad_enabled(training):
        gc.disable()
        output = pipe(torch.ones(2, 2, requires_grad=True))
        if training:
            output.sum().backward()
        gc.enable()
    assert len(references) >= 4
    assert all(reference() is None for reference in references)


def test_a_failure_with_skips_on_the_way_hangs_nobody() -> None:
    class Fail(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            if current_microbatch().index == 1:
                raise ValueError("between stash and pop")
            return input

    with GPipe(nn.Sequential(Stash(), Fail(), Pop()), [1, 1, 1], chunks=3) as pipe:
        pipe.step_timeout = 60
        for _ in range(3):
            with pytest.raises(ValueError, match="between stash and pop"):
                pipe(torch.ones(3, 4))


# As torchgpipe's guide has it: skips in a dictionary keyed by current_microbatch(), known to no boundary.


class Remember(nn.Module):
    def __init__(self, skips: dict[object, Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.skips = skips

    def forward(self, input: Tensor) -> Tensor:
        output = self.norm(self.linear(input))
        self.skips[current_microbatch()] = output
        return output * 1


class Recall(nn.Module):
    def __init__(self, skips: dict[object, Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.skips = skips

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input) + self.skips.pop(current_microbatch())


def with_dictionary() -> tuple[nn.Sequential, dict[object, Tensor]]:
    torch.manual_seed(0)
    skips: dict[object, Tensor] = {}
    return nn.Sequential(nn.Linear(4, 4), Remember(skips), nn.Tanh(), Recall(skips)), skips


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_dictionary_of_skips_between_partitions_is_an_error_that_says_what_to_do(checkpoint: str) -> None:
    model, _ = with_dictionary()
    before = copy.deepcopy(model.state_dict())
    with GPipe(model, [2, 2], chunks=2, checkpoint=checkpoint) as pipe:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"layer '3' \(Recall\) used a tensor.*@skippable"):
                pipe(torch.randn(6, 4))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_within_one_partition_the_dictionary_survives_checkpointing() -> None:
    model, _ = with_dictionary()
    plain = plain_pipe(with_dictionary()[0], chunks=2)
    input, target = torch.randn(6, 4), torch.randn(6, 4)
    with GPipe(model, [1, 3], chunks=2, checkpoint="always") as pipe:
        losses = [each.step(input, target, functional.mse_loss, key=0) for each in (pipe, plain)]
    assert torch.equal(*losses)
    for (name, mine), theirs in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_a_skip_that_is_gone_in_recompute_is_a_key_error_that_names_its_layer() -> None:
    """No gradient goes through this skip, so nothing is amiss until the dictionary is asked again."""

    class RememberInput(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            if not is_recomputing():
                skips[current_microbatch()] = input.detach()
            return input * 1

    class Take(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + skips.pop(current_microbatch())

    skips: dict[object, Tensor] = {}
    model = nn.Sequential(RememberInput(), nn.Linear(4, 4), Take(4, 4))
    with GPipe(model, [2, 1], chunks=2, checkpoint="always") as pipe, pytest.raises(KeyError) as caught:
        pipe(torch.ones(4, 4)).sum().backward()
    assert "layer '2' (Take)" in caught.value.__notes__[0]
    assert "with @skippable" in caught.value.__notes__[0]


def test_current_microbatch_is_one_key_per_micro_batch_in_forward_and_recomputation() -> None:
    keys: list[list[object]] = [[], []]

    class Note(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place

        def forward(self, input: Tensor) -> Tensor:
            keys[self.place].append(current_microbatch())
            return input * 1

    with GPipe(nn.Sequential(Note(0), Note(1)), [1, 1], chunks=3, checkpoint="always") as pipe:
        pipe(torch.ones(3, 1, requires_grad=True)).sum().backward()
    forward, recomputed = keys[0][:3], keys[0][3:]
    assert forward == recomputed == keys[1][:3] == keys[1][3:]
    assert len({*forward}) == 3
    assert [key.index for key in forward] == [0, 1, 2]
    reference = weakref.ref(forward[0])
    del forward, recomputed
    keys[0].clear()
    keys[1].clear()
    gc.collect()
    assert reference() is None
