"""Frozen parameters under every engine: the same bits, no gradients, no optimizer state, nothing written back."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.engines import offload, single, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec, TrainingObjective
from gpipe_cli.engines.state import EngineState, with_trained
from gpipe_cli.errors import RunError
from gpipe_cli.offload import tiers
from gpipe_cli.profiling.records import Sample
from gpipe_cli.sequential.selection import freeze

CPU = torch.device("cpu")
WIDTH = 16
LAYER = 4 * WIDTH * WIDTH
"""The bytes of one weight."""


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(self.base(input) + self.adapter(input))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    start = [nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False) for _ in range(2)]
    return nn.Sequential(*start, Adapted(), Adapted())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, WIDTH, generator=generator), torch.randint(WIDTH, (6,), generator=generator)


def objective(**changes: Any) -> TrainingObjective:
    loss = nn.CrossEntropyLoss()
    optimizer = partial(torch.optim.AdamW, lr=0.0)
    return TrainingObjective(**{"loss": loss, "measure": lambda *_: {}, "optimizer": optimizer, **changes})


def build(
    name: str,
    task: TrainingObjective,
    folder: Path,
    module: nn.Sequential | None = None,
    referenced: frozenset[str] = frozenset(),
    *,
    deferred: bool = False,
) -> Engine:
    input, target = batch(0)
    spec = EngineSpec(
        module or model(),
        task,
        [4] if name == "single" else [1, 1, 1, 1],
        [CPU] if name in ("single", "offload") else [CPU] * 4,
        chunks=3,
        eval_chunks=1,
        checkpoint="never" if name == "single" else "always",
        deferred_batch_norm=deferred,
        scratch=folder,
        referenced=referenced,
        make_sample=lambda: Sample(input[:2], target[:2], task.loss),
    )
    if name == "offload":
        return offload.build(spec, slices=4, to="disk")
    return single.build(spec) if name == "single" else threads.build(spec)


def values(state: EngineState) -> dict[str, Tensor]:
    tensors = {**state.model, **state.optimizer}
    return {name: state.value(tensor).clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("changes", [{}, {"clip_grad_norm": 0.1}, {"precision": "fp16"}], ids=str)
@pytest.mark.parametrize("name", ["threads", "offload"])
def test_training_with_frozen_parameters_is_that_of_one_thread(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    with (
        closing(build(name, objective(**changes), tmp_path)) as engine,
        closing(build("single", objective(**changes), tmp_path)) as reference,
    ):
        for step in range(3):
            facts = [each.train_step(batch(step), key=step, lr=0.1) for each in (engine, reference)]
            assert facts[0].loss == facts[1].loss and facts[0].grad_norm == facts[1].grad_norm
        mine, theirs = values(engine.state()), values(reference.state())
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
        # The frozen weights are those the model began with, and the optimizer keeps nothing for them.
        assert all(
            torch.equal(mine[key], value)
            for key, value in model().state_dict().items()
            if "adapter" not in key
        )
        assert {key.split("/")[0] for key in mine if "/" in key} == {"2.adapter.weight", "3.adapter.weight"}
        other = build(name, objective(**changes), tmp_path)
        with closing(other):
            other.load_state(engine.state())
            loaded = values(other.state())
            assert all(torch.equal(loaded[key], mine[key]) for key in mine)


class Traffic:
    """The bytes that a step reads from its file, and writes to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = {"read": 0, "write": 0}
        for name in self.bytes:
            monkeypatch.setattr(
                tiers._DiskRegion, name, self._counting(name, getattr(tiers._DiskRegion, name))
            )

    def _counting(self, name: str, move: Any) -> Any:
        def counting(region: Any, begin: int, tensor: Tensor) -> None:
            self.bytes[name] += len(tensor)
            move(region, begin, tensor)

        return counting


@pytest.mark.parametrize("clip", [None, 0.1])
def test_an_offloaded_frozen_weight_is_read_where_it_is_used_and_never_written(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(build("offload", objective(clip_grad_norm=clip), tmp_path)) as engine:
        for step in range(2):
            engine.train_step(batch(step), key=step, lr=0.1)
        engine.state()  # waits until everything is stored
        traffic = Traffic(monkeypatch)
        engine.train_step(batch(2), key=2, lr=0.1)
        engine.state()
    inputs = (
        6 * WIDTH * 4
    )  # slice 2 recomputes from it; slice 3 never leaves the device, 0 and 1 recompute nothing
    update = 2 * 3 * LAYER  # two adapters, each with two moments
    gradients = 0 if clip is None else 2 * LAYER
    assert traffic.bytes["write"] == inputs + update + gradients
    # Forward reads every slice, and backward that of slice 2 only: slice 3 is still there, 0 and 1 have no backward.
    weights = 6 * LAYER + 2 * LAYER
    states = 2 * 2 * LAYER
    again = 0 if clip is None else 2 * LAYER
    assert traffic.bytes["read"] <= inputs + weights + states + gradients + again


class Counted(torch.autograd.Function):
    """Passes a tensor on, and counts how often backward comes by."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, counts: dict[str, int], name: str) -> Tensor:
        ctx.count = lambda: counts.update({name: counts.get(name, 0) + 1})
        return input.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.count()
        return (*gradients, None, None)


class Block(nn.Module):
    """A layer with batch norm, in which the backward passes are counted."""

    def __init__(self, name: str, counts: dict[str, int]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.name, self.counts = name, counts

    def forward(self, input: Tensor) -> Tensor:
        counted: Tensor = Counted.apply(self.norm(self.linear(input)), self.counts, self.name)
        return torch.tanh(counted)


def blocks(counts: dict[str, int], *patterns: str) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(name, counts) for name in "abcd"))
    freeze(module, patterns)
    return module


@pytest.mark.parametrize("deferred", [False, True])
def test_every_engine_leaves_frozen_layers_as_they_are_and_runs_no_backward_below_the_first_trained_one(
    deferred: bool, tmp_path: Path
) -> None:
    results = {}
    for name in ("single", "threads", "offload"):
        counts: dict[str, int] = {}
        module = blocks(counts, "0", "1", "3.norm")
        with closing(build(name, objective(), tmp_path, module, deferred=deferred)) as engine:
            losses = [engine.train_step(batch(step), key=step, lr=0.1).loss for step in range(3)]
            engine.eval_step(batch(0))  # sets the modes of all modules, and sets them back
            losses.append(engine.train_step(batch(3), key=3, lr=0.1).loss)
            results[name] = losses, values(engine.state())
        # Four steps of three micro-batches each.
        assert counts == {"c": 12, "d": 12}
    before, (losses, after) = blocks({}).state_dict(), results["single"]
    for other_losses, other in results.values():
        assert other_losses == losses and other.keys() == after.keys()
        assert all(torch.equal(other[key], after[key]) for key in after)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if key.startswith(("2.", "3.linear."))}
    trained = {path.rpartition("/")[0] for path in after if "/" in path}
    assert trained == {key for key in changed if key.endswith((".weight", ".bias"))}


@pytest.mark.parametrize("name", ["single", "threads", "offload"])
def test_a_parameter_that_was_frozen_starts_without_optimizer_state(name: str, tmp_path: Path) -> None:
    """A run may resume with other frozen layers; the parameters that both train keep their state."""
    with closing(build(name, objective(), tmp_path, blocks({}, "0", "1"))) as engine:
        engine.train_step(batch(0), key=0, lr=0.1)
        state = engine.state()
        module = blocks({}, "3")
        trained = [key for key, parameter in module.named_parameters() if parameter.requires_grad]
        with closing(build(name, objective(), tmp_path, module)) as resumed:
            resumed.load_state(with_trained(state, trained))
            before, after = values(state), values(resumed.state())
            kept = {path for path in before if "/" in path and path.startswith("2.")}
            assert {path for path in after if "/" in path} == kept
            assert all(torch.equal(after[path], before[path]) for path in after)
            resumed.train_step(batch(1), key=1, lr=0.1)
            steps = {path: int(value) for path, value in values(resumed.state()).items() if "/step" in path}
            assert steps == {f"{key}/step": 2 if key.startswith("2.") else 1 for key in trained}


def test_a_model_without_any_trained_parameter_runs(tmp_path: Path) -> None:
    """Every parameter of a rank may be frozen, so an optimizer without parameters must work."""
    for name in ("single", "threads", "offload"):
        module = model().requires_grad_(False)
        with closing(build(name, objective(), tmp_path, module)) as engine:
            assert engine.train_step(batch(0), key=0, lr=0.1).loss > 0
            assert all(
                torch.equal(value, model().state_dict()[key]) for key, value in values(engine.state()).items()
            )


@pytest.mark.parametrize("name", ["single", "threads", "offload"])
def test_a_state_leaves_out_what_is_referenced_and_may_lack_nothing_else(name: str, tmp_path: Path) -> None:
    frozen = frozenset(key for key, parameter in model().named_parameters() if not parameter.requires_grad)
    with (
        closing(build(name, objective(), tmp_path, referenced=frozen)) as engine,
        closing(build(name, objective(), tmp_path, referenced=frozen)) as resumed,
        closing(build(name, objective(), tmp_path)) as complete,
    ):
        engine.train_step(batch(0), key=0, lr=0.1)
        state = engine.state()
        assert state.model.keys() == {"2.adapter.weight", "3.adapter.weight"}
        resumed.load_state(state)
        facts = [each.train_step(batch(1), key=1, lr=0.1).loss for each in (engine, resumed)]
        assert facts[0] == facts[1]
        with pytest.raises(RunError, match=r"does not fit the model: it has no tensor '0.weight'"):
            complete.load_state(state)
        with pytest.raises(RunError, match=r"it has no tensor '3.adapter.weight'"):
            resumed.load_state(replace(state, model={"2.adapter.weight": state.model["2.adapter.weight"]}))
        complete.train_step(batch(0), key=0, lr=0.1)
        resumed.load_state(complete.state())  # a state with everything fits as well
