"""How well weights in half precision learn: a small Llama on the sonnets, updated in each way that gpipe has.

    python -m benchmarks.half_precision
    python -m benchmarks.half_precision --steps 20 --lr 1e-4

All start from the same random weights, rounded to bfloat16, and see the same mini-batches, with AdamW at a constant
rate. `loss` is the mean of the last tenth of the steps. `changed` is the share of weights that an update changes, and
`moved` the distance between the weights at the end and at the start, relative to float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.models.huggingface import transformers
from gpipe_cli.build.optimizer import optimizer_factory
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.data.texts import build_text
from gpipe_cli.engines import single
from gpipe_cli.engines.protocol import EngineSpec, TrainingObjective
from gpipe_cli.losses.cross_entropy import TokenCrossEntropy
from gpipe_cli.sequential import to_sequential
from gpipe_cli.training.loop import step_key

WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16, nearest": (torch.bfloat16, {"rounding": "nearest"}),
    "bfloat16, stochastic": (torch.bfloat16, {"rounding": "stochastic"}),
    "bfloat16, master": (torch.bfloat16, {"master": True}),
}
ROWS, CONTEXT = 16, 64


@final
@dataclass(frozen=True)
class Learned:
    loss: float
    changed: float
    moved: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.half_precision")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, nargs="+", default=[2e-5, 2e-4])
    options = parser.parse_args()
    table = Table("lr", "weights", "loss", "changed per step", "moved", box=None)
    for lr in options.lr:
        learned = {name: _train(name, lr, options.steps) for name in WAYS}
        for name, own in learned.items():
            moved = own.moved / learned["float32"].moved
            table.add_row(f"{lr:g}", name, f"{own.loss:.3f}", f"{own.changed:.1%}", f"{moved:.1%}")
    Console(width=110).print(table)
    return 0


def _train(way: str, lr: float, steps: int) -> Learned:
    dtype, keys = WAYS[way]
    module = _model().to(dtype)
    settings = TrainConfig(optimizer={"_target_": "torch.optim.AdamW", "lr": lr, **keys})
    loss = TokenCrossEntropy()
    objective = TrainingObjective(loss, loss.measure, optimizer_factory(settings, module), clip_grad_norm=1.0)
    spec = EngineSpec(
        module, objective, [len(module)], [torch.device("cpu")], chunks=1, eval_chunks=1, checkpoint="never"
    )
    losses, changed = [], []
    with closing(single.build(spec)) as engine:
        start = before = _weights(module)
        for step, batch in enumerate(_batches(steps)):
            losses.append(engine.train_step(batch, step_key(0, step), lr).loss)
            now = _weights(module)
            changed.append((now != before).float().mean().item())
            before = now
    last = losses[-max(1, steps // 10) :]
    moved = torch.linalg.vector_norm(before.double() - start.double()).item()
    return Learned(sum(last) / len(last), sum(changed) / len(changed), moved)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=256, num_hidden_layers=4, use_cache=False, **sizes)
    model = transformers.LlamaForCausalLM(config)
    # float32 starts where bfloat16 does.
    return to_sequential(model.bfloat16().float(), torch.zeros(2, CONTEXT, dtype=torch.int64))


def _batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = build_text(context=CONTEXT).train
    for step in range(steps):
        rows = torch.randint(len(data), (ROWS,), generator=torch.Generator().manual_seed(step)).tolist()
        inputs, targets = zip(*(data[row] for row in rows), strict=True)
        yield torch.stack(inputs), torch.stack(targets)


def _weights(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])


if __name__ == "__main__":
    sys.exit(main())
