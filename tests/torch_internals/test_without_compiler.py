"""Seen in an interpreter of its own, because others in this process may have loaded the compiler."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, torch
from torch import nn
from gpipe_cli.torch_internals.fake_tensors import fake_tensors
from gpipe_cli.torch_internals.without_compiler import without_compiler

for _ in range(2):
    with fake_tensors():
        assert nn.Linear(2, 3)(torch.ones(1, 2)).shape == (1, 3)
assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys() and "_dynamo" not in vars(torch)

layer = nn.Linear(2, 2)
layer(torch.ones(1, 2)).sum().backward()
with without_compiler():
    optimizer = torch.optim.AdamW(layer.parameters())
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules

def twice(input):
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    return input * 2

assert torch.equal(torch.compile(twice, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))
assert len(optimizer.param_groups) == 2 and "torch._dynamo" in sys.modules
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
with fake_tensors():
    assert torch.ones(2).shape == (2,)
"""


def test_optimizers_and_fake_tensors_do_without_the_compiler_and_it_works_when_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
