"""The cases that benchmarks train: a model as a sequence, one mini-batch, a loss and two balances.

Every system gets the same case, built from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[Any, Tensor], Tensor]
"""The mean loss of a batch."""


@final
@dataclass(frozen=True)
class Case:
    model: nn.Sequential
    input: Tensor
    target: Tensor
    loss: Loss
    balance: list[int]
    """For two partitions."""
    interleaved_balance: list[int]
    """For four partitions on two devices."""
    original: nn.Module | None = None
    """The model that `model` was traced from, with the same parameters."""


def build(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def _resnet50() -> Case:
    # Imported late: this imports torchvision, which the other cases do not need.
    from gpipe_cli.models import resnet

    return Case(
        nn.Sequential(*resnet.build("resnet50", num_classes=1000)),
        torch.randn(32, 3, 64, 64),
        torch.randint(1000, (32,)),
        functional.cross_entropy,
        # With micro-batches of 4, the wide convolutions of the last stage take half the time.
        [14, 4],
        [5, 9, 2, 2],
    )


def _transformer() -> Case:
    layers = [
        # No dropout: peers draw other masks, which would make results incomparable.
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        for _ in range(12)
    ]
    batch = torch.randn(2, 32, 128, 256)
    return Case(nn.Sequential(*layers), batch[0], batch[1], functional.mse_loss, [6, 6], [3, 3, 3, 3])


def _mlp() -> Case:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(64)]
    batch = torch.randn(2, 256, 256)
    return Case(nn.Sequential(*layers), batch[0], batch[1], functional.mse_loss, [32, 32], [16, 16, 16, 16])


def _llama() -> Case:
    # Imported late: this imports transformers, which the other cases do not need.
    from benchmarks.models.huggingface import transformers
    from gpipe_cli.sequential import partition_uniform, to_sequential

    original = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )
    batch = torch.randint(512, (2, 32, 128))
    model = to_sequential(original, batch[0, :2])
    # Two layers per block, and a small vocabulary: an equal number of layers is an equal amount of work.
    balance, interleaved = ([len(part) for part in partition_uniform(model, count)] for count in (2, 4))
    return Case(model, batch[0], batch[1], _token_loss, balance, interleaved, original)


def _token_loss(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def _unet() -> Case:
    from gpipe_cli.models import unet

    model = nn.Sequential(*unet.build(base_channels=24, input_shape=(3, 64, 64)))
    batch, target = torch.randn(16, 3, 64, 64), torch.randint(4, (16, 64, 64))
    half = len(model) // 2
    quarter = len(model) // 4
    return Case(
        model,
        batch,
        target,
        functional.cross_entropy,
        [half, len(model) - half],
        [quarter, quarter, quarter, len(model) - 3 * quarter],
    )


def _empty() -> Case:
    """Layers that do nothing, so that only the system's own cost remains."""
    batch = torch.randn(2, 8, 1, requires_grad=True)
    layers = [nn.Identity() for _ in range(4)]
    input, target = batch.detach()[0].requires_grad_(), batch.detach()[1]
    return Case(nn.Sequential(*layers), input, target, functional.mse_loss, [2, 2], [1, 1, 1, 1])


def _tiny() -> Case:
    """Small enough for a test of the harness."""
    batch = torch.randn(2, 16, 4)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    return Case(nn.Sequential(*layers), batch[0], batch[1], functional.mse_loss, [2, 2], [1, 1, 1, 1])


CASES: Mapping[str, Callable[[], Case]] = {
    "resnet50": _resnet50,
    "transformer": _transformer,
    "mlp": _mlp,
    "llama": _llama,
    "unet": _unet,
    "empty": _empty,
    "tiny": _tiny,
}
