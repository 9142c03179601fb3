from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.distributed.boundary_shapes import BoundarySpec, ShapeInference
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.context import CallerState
from gpipe_cli.pytree import SINGLE, flatten
from tests.distributed.tasks import make

CPU = torch.device("cpu")


def boundaries(sketch: ShapeInference, value: Any, *, training: bool) -> tuple[BoundarySpec, ...]:
    return sketch.boundaries(*flatten(value, "input"), CallerState.capture(), training=training)


def test_a_boundary_carries_the_value_and_the_skips_that_pass_it_but_no_skip_that_is_none() -> None:
    task = make("odd_borders", 3)
    sketch = ShapeInference(task.model, [1, 2, 2, 3], CPU)
    first, second, third, fourth = boundaries(sketch, task.input, training=True)
    assert first.template == SINGLE and [kind.shape for kind in first.kinds] == [(3, 6)]
    for boundary, needs_grad in ((second, False), (third, True)):
        assert boundary.template != SINGLE and [name.name for name in boundary.skip_names] == ["early"]
        assert [(kind.shape, kind.dtype, kind.needs_grad) for kind in boundary.kinds] == [
            ((3, 5, 6), torch.float32, needs_grad),
            ((3,), torch.int64, False),
            ((3, 6), torch.bool, False),
            ((3, 6), torch.float32, True),
        ]
    assert fourth.template == SINGLE and fourth.skip_names == ()


def test_inferring_boundaries_leaves_the_model_as_it_was() -> None:
    task = make("normed", 4)
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    generator = torch.get_rng_state()
    boundaries(ShapeInference(task.model, [3, 4], CPU), task.input, training=True)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[name], tensor) for name, tensor in task.model.state_dict().items())


def test_in_evaluation_nothing_needs_a_gradient_and_autocast_counts() -> None:
    task = make("normed", 4)
    sketch = ShapeInference(task.model, [4, 3], CPU)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        _, boundary = boundaries(sketch, task.input, training=False)
    (kind,) = boundary.kinds
    assert (kind.shape, kind.dtype, kind.needs_grad) == ((4, 2, 6), torch.bfloat16, False)


class Looking(nn.Module):
    def forward(self, input: Tensor) -> Any:
        return input if input.sum() > 0 else -input


def test_a_layer_that_looks_at_values_is_named() -> None:
    sketch = ShapeInference(nn.Sequential(nn.Linear(2, 2), Looking()), [1, 1], CPU)
    with pytest.raises(ConfigError, match=r"layer '1' \(Looking\) looks at the values .* use engine=threads"):
        boundaries(sketch, torch.ones(1, 2), training=True)
