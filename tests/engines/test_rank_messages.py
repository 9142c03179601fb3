"""What ranks exchange besides activations and gradients of boundaries does not grow with the model."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from gpipe_cli.distributed import setup_process_groups
from gpipe_cli.distributed.world import World
from gpipe_cli.engines import processes
from gpipe_cli.engines.protocol import EngineSpec, TrainingObjective
from gpipe_cli.losses.cross_entropy import CrossEntropy
from gpipe_cli.runs.snapshots.contents import open_large_snapshot, write_snapshot
from gpipe_cli.runs.snapshots.manifest import search_together, snapshot_path, snapshot_paths
from gpipe_cli.runs.snapshots.record import TrainingRecord, versions
from gpipe_cli.training.loop import Position
from tests.distributed.posted_operations import recording
from tests.support.forked_ranks import run_ranks

WIDTH, ROWS = 96, 4
CPU = torch.device("cpu")


def _first(output: Tensor) -> Tensor:
    return output[:, 0].contiguous()


def _work(rank: int, ranks: int, folder: Path) -> None:
    """A step with clipping, an evaluation, a prediction, a snapshot, and its loading."""
    setup_process_groups([("data", 1), ("pipe", ranks)])
    world = World.current().for_thread(timedelta(minutes=10))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2 * ranks)))
    loss = CrossEntropy()
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    spec = EngineSpec(
        model,
        TrainingObjective(loss, loss.measure, optimizer, clip_grad_norm=1.0),
        [2] * ranks,
        [CPU] * ranks,
        chunks=2,
        eval_chunks=2,
    )
    batch = torch.randn(ROWS, WIDTH), torch.randint(WIDTH, (ROWS,))
    with recording() as recorder:
        engine = processes.build(spec)
        engine.train_step(batch, key=0, lr=0.1)
        engine.eval_step(batch)
        engine.predict(batch[0], _first)
        state = engine.state()
        record = TrainingRecord(Position(1, 1.0), None, 1, 0, 1, versions(), state.numbers)
        write_snapshot(snapshot_path(folder / "run", 1), state, record, lambda: None, world)
        newest = search_together(snapshot_paths(folder / "run"), (), world).newest
        assert newest is not None
        engine.load_state(open_large_snapshot(newest).state)
        engine.close()
    operations = [operation for posted in recorder.program for operation in posted]
    sizes = {f"{operation.kind} {operation.content}" for operation in operations}
    (folder / f"{rank}.json").write_text(json.dumps(sorted(sizes)))


def test_no_message_between_ranks_is_as_large_as_a_layer(tmp_path: Path) -> None:
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    run_ranks(_work, 2, tmp_path)
    for rank in range(2):
        posted = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(posted) > 5, "it has recorded something"
        largest = max(int(content.split()[1]) for content in posted if len(content.split()) == 3)
        assert ROWS // 2 * WIDTH <= largest < WIDTH * WIDTH // 2, posted
