"""Parameter groups: which parameters they have, what is refused, and equal bits however the model is divided."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.build.optimizer import optimizer_factory, parameter_groups
from gpipe_cli.config.schema import CostConfig
from gpipe_cli.engines.state import EngineState, OptimizerState
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.profiling.memory import state_bytes
from gpipe_cli.sequential import LayerSequence
from tests.engines.test_frozen import WIDTH, batch, build, objective, values

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        rows = self.norm1(input).unsqueeze(1)
        return input + self.attention(rows, rows, rows, need_weights=False)[0].squeeze(1)


def model() -> LayerSequence:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, WIDTH)]
    return LayerSequence(
        layers, paths=["embed", "blocks.0", "blocks.1", "fc"], names=["stem", "a", "b", "head"]
    )


def groups_of(node: dict[str, Any]) -> list[tuple[dict[str, Any], set[str]]]:
    groups = parameter_groups({**ADAMW, **node}, model())
    return [
        (dict(options), {name for name, own in groups.indices.items() if own == index})
        for index, options in enumerate(groups.options)
    ]


def test_norms_and_biases_do_not_decay() -> None:
    (decaying, weights), (exempt, rest) = groups_of({"no_decay": ["norm", "bias"]})
    assert (decaying, exempt) == ({}, {"weight_decay": 0.0})
    linear = {"embed.weight", "fc.weight"}
    assert weights == linear | {
        f"blocks.{index}.attention.{name}.weight" for index in (0, 1) for name in ("out_proj",)
    } | {f"blocks.{index}.attention.in_proj_weight" for index in (0, 1)}
    assert {"blocks.0.norm1.weight", "blocks.0.attention.in_proj_bias", "fc.bias"} < rest


def test_a_parameter_is_in_the_first_group_that_matches_it() -> None:
    asked = [{"match": "head", "lr_scale": 10}, {"match": ["*.bias", "norm"], "weight_decay": 0.2}]
    rest, biases, head, head_bias, other = groups_of({"no_decay": ["bias"], "groups": asked})
    assert "embed.weight" in rest[1] and biases[1] == {f"blocks.{i}.attention.in_proj_bias" for i in (0, 1)}
    assert head == ({"lr_scale": 10}, {"fc.weight"})
    assert head_bias == ({"weight_decay": 0.0, "lr_scale": 10}, {"fc.bias"})
    # What a group says itself beats no_decay.
    assert other[0] == {"weight_decay": 0.2} and {"embed.bias", "blocks.0.norm1.bias"} < other[1]


def test_without_groups_an_optimizer_gets_plain_parameters() -> None:
    assert groups_of({}) == [({}, {name for name, _ in model().named_parameters()})]
    named = list(model().named_parameters())
    assert parameter_groups(ADAMW, model()).divide(named) == [parameter for _, parameter in named]


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (
            {"groups": [{"match": "hed", "lr_scale": 2}]},
            r"optimizer.groups\[0\].match=hed: no parameter .* 'head'",
        ),
        (
            {"no_decay": ["norm", "layr"]},
            r"optimizer.no_decay=layr: no parameter of the model has such a name",
        ),
        ({"no_decay": ["nrm"]}, r"optimizer.no_decay=nrm: .*; did you mean 'norm'\?"),
        (
            {"groups": [{"match": "*.bias", "lr_scale": 2}, {"match": "fc.bias", "lr_scale": 3}]},
            r"groups\[1\].match=fc.bias: every parameter that it matches is in an earlier group",
        ),
    ],
)
def test_a_pattern_that_selects_nothing_is_refused(node: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parameter_groups({**ADAMW, **node}, model())


def test_a_group_of_frozen_parameters_only_is_refused_and_a_model_without_norms_is_fine() -> None:
    frozen = model()
    frozen[0].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"match=stem: every parameter that it matches is frozen"):
        parameter_groups({**ADAMW, "groups": [{"match": "stem", "lr_scale": 2}]}, frozen)
    plain = nn.Sequential(nn.Linear(2, 2, bias=False))
    assert parameter_groups({**ADAMW, "no_decay": ["norm", "bias"]}, plain).options == [{}]
    with pytest.raises(ConfigError, match=r"match=norm: the model has no such parameter"):
        parameter_groups({**ADAMW, "groups": [{"match": "norm", "lr_scale": 2}]}, plain)


class OneMomentum(torch.optim.SGD):
    """Takes an option that it does not look for in its groups."""

    def __init__(self, params: Any, lr: float, heavy: float = 0.9) -> None:
        super().__init__(params, lr)


def test_an_option_that_an_optimizer_has_once_for_all_parameters_is_refused() -> None:
    node = {"_target_": f"{__name__}.OneMomentum", "lr": 0.1, "groups": [{"match": "head", "heavy": 0.5}]}
    make = optimizer_factory(CostConfig(optimizer=node, allow=["tests"]), model())
    with pytest.raises(ConfigError, match=r"groups\[0\].heavy: OneMomentum has one value for all parameters"):
        make(model().named_parameters())


GROUPED = {
    **ADAMW,
    "no_decay": ["norm", "bias"],
    "groups": [
        {"match": "head", "lr_scale": 10, "amsgrad": True},
        {"match": "blocks.1", "weight_decay": 0.5, "betas": [0.5, 0.9]},
    ],
}


def by_hand(steps: int) -> dict[str, Tensor]:
    """The same with torch alone, one parameter at a time."""
    module = model()
    optimizers = []
    for name, parameter in module.named_parameters():
        plain = "norm" in name or "bias" in name
        options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0 if plain else 0.1}
        if name.startswith("fc"):
            options |= {"lr": 1.0, "amsgrad": True}
        if name.startswith("blocks.1"):
            options |= {"weight_decay": 0.5, "betas": (0.5, 0.9)}
        optimizers.append(torch.optim.AdamW([parameter], **options))
    for step in range(steps):
        module.zero_grad()
        input, target = batch(step)
        # As a pipe does: the mean of each of three micro-batches, weighted.
        losses = [
            nn.functional.cross_entropy(module(rows), labels) / 3
            for rows, labels in zip(input.split(2), target.split(2), strict=True)
        ]
        for loss in losses:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def grouped(name: str, folder: Path, **changes: Any) -> Any:
    module = model()
    make = optimizer_factory(CostConfig(optimizer=GROUPED), module)
    return closing(build(name, objective(optimizer=make, **changes), folder, module))


def test_groups_train_like_optimizers_of_their_own(tmp_path: Path) -> None:
    with grouped("single", tmp_path) as engine:
        for step in range(2):
            engine.train_step(batch(step), key=step, lr=0.1)
        trained, expected = engine.state().model, by_hand(2)
    assert all(torch.allclose(trained[name], value, atol=1e-5) for name, value in expected.items())


@pytest.mark.parametrize("changes", [{}, {"clip_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("name", ["threads", "offload"])
def test_every_engine_resumes_groups_to_the_bit_from_any_other(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    with (
        grouped("single", tmp_path, **changes) as reference,
        grouped(name, tmp_path, **changes) as engine,
        grouped("single", tmp_path, **changes) as resumed,
    ):
        for step in range(2):
            facts = [each.train_step(batch(step), key=step, lr=0.1) for each in (reference, engine)]
            assert facts[0].loss == facts[1].loss
        state = engine.state()
        assert any(key.endswith("fc.weight/max_exp_avg_sq") for key in state.optimizer)
        assert not any(key.endswith("embed.weight/max_exp_avg_sq") for key in state.optimizer)
        resumed.load_state(EngineState(**{**vars(state), **_in_memory(state)}))
        for each in (reference, resumed):
            each.train_step(batch(2), key=2, lr=0.1)
        mine, theirs = values(resumed.state()), values(reference.state())
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in theirs)


def _in_memory(state: EngineState) -> dict[str, Any]:
    parts = {"model": state.model, "optimizer": state.optimizer}
    return {
        part: {name: state.value(tensor).clone() for name, tensor in tensors.items()}
        for part, tensors in parts.items()
    } | {"fetch": None}


def test_memory_counts_the_state_of_each_group() -> None:
    module = model()
    make = optimizer_factory(CostConfig(optimizer=GROUPED), module)
    sizes = dict(
        zip(
            (name for name, _ in module.named_parameters()),
            state_bytes(make, module.named_parameters()),
            strict=True,
        )
    )
    matrix = 4 * WIDTH * WIDTH
    assert (sizes["embed.weight"], sizes["fc.weight"]) == (2 * matrix + 4, 3 * matrix + 4)


def _state_of(node: dict[str, Any]) -> OptimizerState:
    module = model()
    make = optimizer_factory(CostConfig(optimizer=node), module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer = make(module.named_parameters())
    state = OptimizerState(optimizer, names, make)
    module(batch(0)[0]).sum().backward()
    optimizer.step()
    return state


def test_a_run_may_resume_with_other_groups_unless_an_optimizer_changed_them_differently() -> None:
    tensors, numbers = _state_of(ADAMW).take()
    assert numbers["groups"] == [{}]
    other = _state_of({**ADAMW, "no_decay": ["bias"]})
    other.put(tensors, numbers)
    assert other.take()[1]["groups"] == [{}, {}]
    with pytest.raises(
        RunError, match=r"its 2 parameter groups have different settings, and now there are 1"
    ):
        _state_of(ADAMW).put(tensors, {**numbers, "groups": [{}, {"maximize": True}]})
