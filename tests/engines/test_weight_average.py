"""ema: the averages are evaluated and saved, the weights are trained, and every engine resumes both to the bit."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.build.optimizer import optimizer_factory
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.engines.parameters import average_weights
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.profiling.memory import state_bytes
from tests.engines.test_frozen import WIDTH, batch, build, model, objective, values

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd without a state": torch.optim.SGD,
}


def factory(decay: float | None, kind: str = "adamw") -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = OPTIMIZERS[kind](parameters, lr=0.0)
        if decay is not None:
            average_weights(optimizer, decay)
        return optimizer

    return make


def engine(
    name: str, folder: Path, decay: float | None = 0.5, kind: str = "adamw", **changes: Any
) -> closing[Engine]:
    task = objective(optimizer=factory(decay, kind), **changes)
    return closing(build(name, task, folder))


def in_memory(state: EngineState) -> EngineState:
    model, optimizer = (
        {name: state.value(tensor).clone() for name, tensor in part.items()}
        for part in (state.model, state.optimizer)
    )
    return replace(state, model=model, optimizer=optimizer, fetch=None)


def trained_by_hand(kind: str, steps: int, decay: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights and their averages with torch alone."""
    module = model()
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    optimizer = OPTIMIZERS[kind](trained.values(), lr=0.1)
    averages: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        input, target = batch(step)
        for rows, labels in zip(input.split(2), target.split(2), strict=True):
            (nn.functional.cross_entropy(module(rows), labels) / 3).backward()
        optimizer.step()
        now = min(decay, (1 + step) / (10 + step))
        for name, parameter in trained.items():
            before = averages.get(name, parameter.detach().clone())
            averages[name] = now * before + (1 - now) * parameter.detach()
    return {name: parameter.detach() for name, parameter in trained.items()}, averages


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_the_average_of_the_weights_after_each_update(kind: str, tmp_path: Path) -> None:
    weights, averages = trained_by_hand(kind, steps=4, decay=0.2)
    with engine("single", tmp_path, decay=0.2, kind=kind) as trained:
        for step in range(4):
            trained.train_step(batch(step), key=step, lr=0.1)
        state = trained.state()
    for name, average in averages.items():
        assert torch.allclose(state.model[name], average, atol=1e-5)
        assert torch.allclose(state.optimizer[f"{name}/other_weights"], weights[name], atol=1e-5)
        assert not torch.allclose(average, weights[name], atol=1e-5)


def test_evaluation_uses_the_averages_and_training_does_not_notice(tmp_path: Path) -> None:
    with engine("single", tmp_path) as averaging, engine("single", tmp_path, decay=None) as plain:
        for step in range(4):
            facts = [each.train_step(batch(step), key=step, lr=0.1) for each in (averaging, plain)]
            assert facts[0].loss == facts[1].loss and facts[0].grad_norm == facts[1].grad_norm
            evaluated = averaging.eval_step(batch(9)).loss
            assert step == 0 or evaluated != plain.eval_step(batch(9)).loss
            input, target = batch(9)
            output = averaging.predict(input, lambda output: output)
            assert nn.functional.cross_entropy(output, target).item() == pytest.approx(evaluated, rel=1e-6)
        reference = nn.Sequential(*model())
        reference.load_state_dict(averaging.state().model)
        input, target = batch(9)
        assert nn.functional.cross_entropy(reference(input), target).item() == pytest.approx(
            evaluated, rel=1e-6
        )


@pytest.mark.parametrize("changes", [{}, {"clip_grad_norm": 0.1}, {"precision": "fp16"}], ids=str)
@pytest.mark.parametrize("name", ["threads", "offload"])
def test_every_engine_averages_and_resumes_like_one_thread(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    with (
        engine("single", tmp_path, **changes) as reference,
        engine(name, tmp_path, **changes) as other,
        engine(name, tmp_path, **changes) as resumed,
    ):
        for step in range(3):
            for each in (reference, other):
                each.train_step(batch(step), key=step, lr=0.1)
            assert other.eval_step(batch(9)).loss == reference.eval_step(batch(9)).loss
        state = in_memory(reference.state())
        saved = in_memory(other.state())
        assert saved.numbers == state.numbers
        assert all(torch.equal(saved.model[key], value) for key, value in state.model.items())
        resumed.load_state(saved)
        assert resumed.eval_step(batch(9)).loss == reference.eval_step(batch(9)).loss
        for each in (reference, resumed):
            each.train_step(batch(3), key=3, lr=0.1)
        mine, theirs = values(resumed.state()), values(reference.state())
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", ["single", "offload"])
def test_a_resumed_run_may_stop_and_begin_to_average(name: str, tmp_path: Path) -> None:
    with (
        engine(name, tmp_path) as averaging,
        engine(name, tmp_path, decay=None) as plain,
        engine(name, tmp_path, decay=None) as stopped,
        engine(name, tmp_path) as begun,
    ):
        for step in range(2):
            for each in (averaging, plain):
                each.train_step(batch(step), key=step, lr=0.1)
        stopped.load_state(in_memory(averaging.state()))
        mine, theirs = values(stopped.state()), values(plain.state())
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in theirs)
        begun.load_state(in_memory(plain.state()))
        assert begun.eval_step(batch(9)).loss == plain.eval_step(batch(9)).loss
        for step in range(2, 5):
            facts = [each.train_step(batch(step), key=step, lr=0.1) for each in (begun, plain)]
            assert facts[0].loss == facts[1].loss
        assert begun.eval_step(batch(9)).loss != plain.eval_step(batch(9)).loss
        with pytest.raises(RunError, match="averaged_updates is -3, not a count"):
            state = in_memory(averaging.state())
            optimizer = {**state.numbers["optimizer"], "groups": [{"averaged_updates": -3}]}
            begun.load_state(replace(state, numbers={**state.numbers, "optimizer": optimizer}))


def test_a_skipped_update_changes_no_average(tmp_path: Path) -> None:
    with engine("single", tmp_path, precision="fp16") as trained:
        trained.train_step(batch(0), key=0, lr=0.1)
        state = in_memory(trained.state())
        before = {**state.model, **state.optimizer}
        # With such a scale the gradients overflow, and the loss does not.
        scaler = {**state.numbers["scaler"], "scale": 2.0**100}
        trained.load_state(replace(state, numbers={**state.numbers, "scaler": scaler}))
        assert trained.train_step(batch(1), key=1, lr=0.1).skipped
        after = values(trained.state())
        assert all(torch.equal(after[key], value) for key, value in before.items())


def test_memory_counts_the_average_and_half_precision_is_refused() -> None:
    node = {"_target_": "torch.optim.SGD", "lr": 0.1}
    settings = TrainConfig(optimizer=node, ema=0.9)
    linear = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    assert state_bytes(optimizer_factory(settings, linear), linear.named_parameters()) == [4 * WIDTH * WIDTH]
    with pytest.raises(ConfigError, match=r"ema=0.9: the model's parameters are bfloat16, too coarse"):
        optimizer_factory(settings, linear.bfloat16())
