"""Seen in an interpreter of its own, because others in this process may have loaded the compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

DEFERRED = """
import sys, torch
from torch import nn
from gpipe_cli.torch_internals.deferred_compiler import deferred_compiler
from gpipe_cli.torch_internals.fake_tensors import fake_tensors

def is_loaded():
    return "torch._dynamo.eval_frame" in sys.modules

with deferred_compiler():
    from gpipe_cli.vision import torchvision
    with fake_tensors():
        assert nn.Linear(2, 3)(torch.ones(1, 2)).shape == (1, 3)
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.AdamW(layer.parameters())
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    with deferred_compiler():
        optimizer.zero_grad()
    assert not is_loaded() and torch._dynamo.config.suppress_errors is False
"""
ENDED = """
    assert not is_loaded()
assert "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)
"""
COMPILED = """
def twice(input):
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    return input * 2

assert torch.equal(torch.compile(twice, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))
assert len(optimizer.param_groups) == 2 and is_loaded()
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert sys.modules["torchvision.ops.roi_align"].is_compile_supported("cpu") is True
with fake_tensors():
    assert torch.ones(2).shape == (2,)
"""
SUBMODULE = """
    from torch._dynamo.eval_frame import OptimizedModule
    assert is_loaded() and torch._dynamo.OptimizedModule is OptimizedModule
    assert type(sys.modules["torch._dynamo.eval_frame"].__spec__.loader).__name__ == "SourceFileLoader"
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(DEFERRED + ENDED + COMPILED, id="torch.compile afterwards", marks=pytest.mark.slow),
        pytest.param(DEFERRED + COMPILED.replace("\n", "\n    "), id="torch.compile inside"),
        pytest.param(DEFERRED + SUBMODULE + COMPILED, id="a submodule inside", marks=pytest.mark.slow),
    ],
)
def test_the_compiler_is_loaded_when_it_is_used_and_works(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_does_not_load_it(tmp_path: object) -> None:
    """`gpipe train` imported torch.distributed.pipelining for every engine, and with it the compiler."""
    program = (
        "import sys\n"
        "from gpipe_cli.cli import main\n"
        "code = main('train model=mlp data=synthetic steps=1'.split())\n"
        "sys.exit(code or 'torch._dynamo.eval_frame' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=str(tmp_path), check=False
    )
    assert done.returncode == 0, done.stderr
