"""Parameters in half precision learn, and every engine updates them with the same random bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe_cli.build.optimizer import optimizer_factory
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.engines import half_precision
from gpipe_cli.engines.half_precision import HalfPrecisionOptimizer, round_stochastically
from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling.memory import state_bytes
from tests.engines.test_frozen import batch, build, model, objective, values
from tests.engines.test_weight_average import in_memory

HALF = [torch.bfloat16, torch.float16]
WAYS: list[dict[str, Any]] = [{"rounding": "stochastic"}, {"master": True}]


def factory(module: nn.Sequential, kind: str = "AdamW", precision: str = "fp32", **keys: Any) -> Any:
    node = {"_target_": f"torch.optim.{kind}", "lr": 0.0, **keys}
    return optimizer_factory(TrainConfig(optimizer=node, precision=precision), module)


def engine(name: str, folder: Path, way: dict[str, Any], *, clip: float | None = None) -> Any:
    module = model().bfloat16()
    task = objective(optimizer=factory(module, **way), clip_grad_norm=clip, precision="bf16")
    return build(name, task, folder, module)


@given(st.floats(-(2.0**15), 2.0**15, width=32), st.sampled_from(HALF))
def test_stochastic_rounding_takes_one_of_the_two_neighbours_and_is_right_on_average(
    value: float, dtype: torch.dtype
) -> None:
    many = torch.full((4096,), value)
    rounded = round_stochastically(many, dtype, torch.Generator().manual_seed(0))
    assert torch.equal(rounded, rounded.to(dtype).float())
    found = rounded.unique().tolist()
    nearest = torch.tensor(value).to(dtype)
    if nearest.float() == value:
        assert found == [value]
        return
    spacing = max(found) - min(found)
    assert len(found) <= 2 and all(abs(each - value) <= abs(value) * 2.0**-7 + 2.0**-24 for each in found)
    # Six standard deviations of a mean of 4096.
    assert len(found) == 1 or abs(rounded.double().mean().item() - value) <= 6 * spacing * 0.5 / 64


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounding_leaves_no_number_for_what_is_none(dtype: torch.dtype) -> None:
    # The nan of CUDA has all bits set, to which adding random bits gave zero.
    bits = torch.tensor([0x7FFFFFFF, 0x7F800000, -0x800000], dtype=torch.int32)
    rounded = round_stochastically(bits.view(torch.float32), dtype, torch.Generator().manual_seed(0))
    assert rounded[0].isnan() and rounded[1:].tolist() == [float("inf"), -float("inf")]


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_the_kernel_of_the_optimizer_updates_in_float32(options: dict[str, bool]) -> None:
    weights = [nn.Parameter(torch.linspace(1, 2, 512).bfloat16()) for _ in range(2)]
    for weight, keys in zip(weights, ({"foreach": False}, options), strict=True):
        module = nn.Sequential(nn.ParameterList([weight]))
        optimizer = factory(module, **keys)([("weight", weight)])
        for step in range(3):
            optimizer.param_groups[0].update({"lr": 1e-3, half_precision.RANDOM_KEY: step})
            weight.grad = torch.linspace(-1, 1, 512).bfloat16()
            optimizer.step()
    assert torch.allclose(*weights, rtol=2.0**-7) and weights[0].dtype == torch.bfloat16


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_small_updates_reach_bfloat16_weights_and_rounding_to_nearest_loses_them(way: dict[str, Any]) -> None:
    def moved(**keys: Any) -> float:
        weight = nn.Parameter(torch.full((64, 64), 1.0, dtype=torch.bfloat16))
        module = nn.Sequential(nn.ParameterList([weight]))
        optimizer = factory(module, **{**keys, "weight_decay": 0.0})([("weight", weight)])
        for step in range(100):
            for group in optimizer.param_groups:
                group.update({"lr": 1e-4, half_precision.RANDOM_KEY: step})
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return 1 - weight.float().mean().item()

    assert moved(rounding="nearest") == 0.0
    assert moved(**way) == pytest.approx(100 * 1e-4, rel=0.25)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adafactor", "RMSprop"])
def test_an_update_with_a_float32_copy_is_that_of_float32_weights(kind: str) -> None:
    half, precise = model().bfloat16(), model().bfloat16().float()
    optimizers = [
        factory(half, kind, master=True)(half.named_parameters()),
        factory(precise, kind)(precise.named_parameters()),
    ]
    for step in range(5):
        for mine, theirs in zip(half.parameters(), precise.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            theirs.grad = mine.grad.float()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3
            optimizer.step()
    for mine, theirs in zip(half.parameters(), precise.parameters(), strict=True):
        assert torch.equal(mine, theirs.bfloat16())
        assert not mine.requires_grad or torch.equal(optimizers[0].state[mine]["master"], theirs)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", ["threads", "offload"])
def test_every_engine_updates_and_resumes_half_precision_like_one_thread(
    name: str, way: dict[str, Any], clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, other, resumed = (engine(each, tmp_path, way, clip=clip) for each in ("single", name, name))
    for step in range(3):
        # The reference updates a parameter at a time, which must not change a bit.
        monkeypatch.setattr(half_precision, "_CHUNK_BYTES", 1)
        expected = reference.train_step(batch(step), key=step, lr=1e-3)
        monkeypatch.undo()
        assert other.train_step(batch(step), key=step, lr=1e-3).loss == expected.loss
    resumed.load_state(in_memory(other.state()))
    for each in (reference, resumed):
        each.train_step(batch(3), key=3, lr=1e-3)
    mine, theirs = values(resumed.state()), values(reference.state())
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in theirs)
    for each in (reference, other, resumed):
        each.close()


def test_the_random_bits_depend_on_the_step_and_the_parameter() -> None:
    def updated(name: str, key: int) -> Tensor:
        weight = nn.Parameter(torch.linspace(1, 2, 512).bfloat16())
        optimizer = HalfPrecisionOptimizer(torch.optim.SGD([weight], lr=1e-3), {weight: name}, master=False)
        optimizer.param_groups[0][half_precision.RANDOM_KEY] = key
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return weight.detach()

    assert torch.equal(updated("a", 1), updated("a", 1))
    assert not torch.equal(updated("a", 1), updated("a", 2))
    assert not torch.equal(updated("a", 1), updated("b", 1))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_float16_weights_learn_under_a_loss_scale_and_are_refused_without(
    way: dict[str, Any], tmp_path: Path
) -> None:
    module = model().half()
    task = objective(optimizer=factory(module, precision="fp16", **way), precision="fp16", clip_grad_norm=1.0)
    with pytest.raises(ConfigError, match=r"model\.dtype=float16: .* set precision=fp16"):
        factory(module)
    with pytest.raises(ConfigError, match=r"optimizer\.rounding=nearest: float16 parameters need"):
        factory(module, precision="fp16", rounding="nearest")
    for other, keys in ((model(), {}), (model().bfloat16(), {"master": True})):
        with pytest.raises(ConfigError, match=r"optimizer\.rounding=nearest: is for updates .*; remove it"):
            factory(other, rounding="nearest", **keys)
    precise = model().half().float()
    trained, reference = (
        build("single", task, tmp_path, module),
        build("single", objective(precision="fp16", clip_grad_norm=1.0), tmp_path, precise),
    )
    for step in range(4):
        facts = [each.train_step(batch(step), key=step, lr=1e-3) for each in (trained, reference)]
        assert not any(each.skipped for each in facts)
        assert facts[0].grad_norm == pytest.approx(facts[1].grad_norm, rel=2e-3)
    for mine, theirs in zip(module.parameters(), precise.parameters(), strict=True):
        assert torch.allclose(mine.float(), theirs, atol=3e-3)
    trained.close()
    reference.close()


def test_memory_counts_what_an_update_in_half_precision_keeps() -> None:
    module = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    named = list(module.named_parameters())
    (stochastic,) = state_bytes(factory(module, rounding="stochastic"), named)
    (master,) = state_bytes(factory(module, master=True), named)
    elements = 64 * 64
    assert (stochastic // elements, master // elements) == (4, 12)


def test_a_float32_copy_of_float32_weights_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer\.master=true: keeps a float32 copy .* the model trains none"
    ):
        factory(model(), master=True)


def test_an_optimizer_that_changes_its_own_settings_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1

    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = HalfPrecisionOptimizer(Counting([weight], lr=0.1), {weight: "weight"}, master=False)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ConfigError, match="Counting changes its own count in each step"):
        optimizer.step()


@pytest.mark.parametrize(("lr", "share"), [(1e-4, 1.0), (0.1, 0.0)])
def test_one_step_counts_the_updates_that_rounding_to_nearest_loses(
    lr: float, share: float, tmp_path: Path
) -> None:
    module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4))).bfloat16()
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    # sign(gradient) * lr, so that a weight of one moves by lr.
    node = {"_target_": "torch.optim.Adam", "lr": lr, "eps": 0.0, "rounding": "nearest"}
    make = optimizer_factory(TrainConfig(optimizer=node), module)
    trained = build("single", objective(optimizer=make, precision="bf16"), tmp_path, module)
    found = [trained.train_step(batch(0), key=0, lr=each).lost_updates for each in (lr / 10, lr, lr)]
    assert found == [None, share, None]
    trained.close()
