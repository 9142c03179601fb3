"""Layers before the first trained one: no gradient, no backward, nothing saved, nothing recomputed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe, is_recomputing

CHUNKS = 4
FROZEN = 3


class Adapted(nn.Module):
    """A frozen weight with a trained adapter beside it, as LoRA makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.adapter = nn.Linear(6, 6, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(self.base(input) + self.adapter(input))


def model(*, frozen: int = FROZEN) -> nn.Sequential:
    torch.manual_seed(0)
    start = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).requires_grad_(False) for _ in range(frozen)]
    return nn.Sequential(*start, Adapted(), nn.Linear(6, 6).requires_grad_(False), Adapted())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor | None]:
    """What plain PyTorch gives with the same micro-batches."""
    plain, (input, target) = model(), batch()
    for part, aim in zip(input.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
        (nn.functional.mse_loss(plain(part), aim) * (len(part) / len(input))).backward()
    return gradients(plain)


class Counted:
    """Counts, by layer, what happens in a step."""

    def __init__(self, module: nn.Sequential) -> None:
        self.recomputed: Counter[int] = Counter()
        self.backward: Counter[int] = Counter()
        self.saved: Counter[int] = Counter()
        for index, layer in enumerate(module):
            layer.register_forward_hook(self._watch(index))
            layer.forward = self._saving(index, layer.forward)  # type: ignore[method-assign]

    def _watch(self, index: int) -> Any:
        def after(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            self.recomputed[index] += is_recomputing()
            if output.requires_grad:
                output.register_hook(lambda gradient: self.backward.update([index]))

        return after

    def _saving(self, index: int, forward: Any) -> Any:
        def keep(tensor: Tensor) -> Tensor:
            self.saved[index] += 1
            return tensor

        def call(input: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                output: Tensor = forward(input)
            return output

        return call


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "interleaved"])
@pytest.mark.parametrize("balance", [[2, 1, 1, 2], [3, 1, 1, 1]], ids=str)
def test_a_partition_before_the_first_trained_layer_only_runs_forward(
    schedule: str, checkpoint: str, balance: list[int], expected: dict[str, Tensor | None]
) -> None:
    module, (input, target) = model(), batch()
    counted = Counted(module)
    devices = ["cpu"] * (2 if schedule == "interleaved" else 4)
    with GPipe(
        module, balance, chunks=CHUNKS, checkpoint=checkpoint, schedule=schedule, devices=devices
    ) as pipe:
        pipe.step(input, target, nn.functional.mse_loss, key=0)
    recomputed = {"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}[checkpoint]
    assert [counted.recomputed[index] for index in range(6)] == [0] * FROZEN + [recomputed] * 3
    assert not any(counted.saved[index] for index in range(FROZEN))
    assert not any(counted.backward[index] for index in range(FROZEN))
    assert all(counted.backward[index] for index in range(FROZEN, 6))
    for name, gradient in gradients(module).items():
        wanted = expected[name]
        assert (gradient is None) == (wanted is None), name
        assert gradient is None or wanted is None or torch.equal(gradient, wanted), name


def test_a_weight_gradient_is_not_computed_for_a_frozen_weight_between_trained_layers() -> None:
    module, (input, target) = model(frozen=0), batch()
    with GPipe(module, [1, 1, 1], chunks=2, schedule="zero_bubble", devices=["cpu"] * 3) as pipe:
        pipe.step(input, target, nn.functional.mse_loss, key=0)
    assert [name for name, gradient in gradients(module).items() if gradient is not None] == [
        "0.adapter.weight",
        "2.adapter.weight",
    ]


def test_loss_backward_ends_at_the_first_trained_layer_too(expected: dict[str, Tensor | None]) -> None:
    module, (input, target) = model(), batch()
    counted = Counted(module)
    with GPipe(module, [2, 1, 1, 2], chunks=CHUNKS, checkpoint="always") as pipe:
        nn.functional.mse_loss(pipe(input), target).backward()
    assert not any(counted.recomputed[index] or counted.backward[index] for index in range(FROZEN))
    for name, gradient in gradients(module).items():
        wanted = expected[name]
        assert (gradient is None) == (wanted is None), name
        if gradient is not None and wanted is not None:
            torch.testing.assert_close(gradient, wanted)
