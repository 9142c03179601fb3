"""gpipe train freeze=[...]: printed and recorded, the same under every engine, and changeable when a run resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.command_line import Gpipe, UserModule
from tests.support.run_files import snapshot_tensors

ALLOW = "allow=[tiny_for_tests]"
LINE = "frozen 4 tensors with 120 of 918 parameters: 0, 1"


def tensors(run: Path, file: str = "model") -> dict[str, torch.Tensor]:
    return snapshot_tensors(max((run / "snapshots").glob("step-*")), file)


def test_what_is_frozen_is_printed_and_recorded(tiny: Gpipe, tmp_path: Path) -> None:
    answer = tiny("train", "freeze=[0,1]", "run_dir=r")
    assert answer.code == 0, answer.err
    assert answer.err.count(LINE) == 1 and f"{LINE.removeprefix('frozen ')}" in answer.out
    launch = json.loads((tmp_path / "r" / "launch.json").read_text())
    assert launch["frozen"]["names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert (launch["frozen"]["elements"], launch["frozen"]["all_elements"]) == (120, 918)
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["frozen"] in LINE
    names = {path.rpartition("/")[0] for path in tensors(tmp_path / "r", "optimizer")}
    assert names == {"4.weight", "4.bias", "7.weight", "7.bias"}
    assert int(tensors(tmp_path / "r")["1.num_batches_tracked"]) == 0


def test_a_dry_run_tells_what_would_be_frozen_and_needs_no_memory_for_its_gradients(tiny: Gpipe) -> None:
    plain, frozen = (tiny("train", *words, "--dry-run", "--json") for words in ((), ("freeze=[0,1]",)))
    assert LINE in frozen.err and frozen.json["frozen"] in LINE
    gradients = [answer.json["partitions"][0]["gradient_bytes"] for answer in (plain, frozen)]
    assert gradients[0] - gradients[1] == 4 * 120


@pytest.mark.slow
def test_a_run_may_resume_with_other_parameters_frozen(tiny: Gpipe, gpipe: Gpipe, tmp_path: Path) -> None:
    """Those that were frozen start without optimizer state; the others keep theirs."""
    assert tiny("train", "freeze=[0,1]", "run_dir=r", "steps=2").code == 0
    for steps, words in ((3, ("freeze=[7]",)), (4, ("freeze=[]", "engine=offload")), (5, ("freeze=[7,4]",))):
        before = tensors(tmp_path / "r")
        answer = gpipe("train", "resume=r", f"steps={steps}", ALLOW, *words)
        assert answer.code == 0 and "changed: freeze: " in answer.err, answer.err
        after = tensors(tmp_path / "r")
        assert torch.equal(before["7.weight"], after["7.weight"]) is (steps != 4)
        assert not torch.equal(before["0.weight"], after["0.weight"])
    counts = {
        path.rpartition("/")[0]: int(count)
        for path, count in tensors(tmp_path / "r", "optimizer").items()
        if path.endswith("/step")
    }
    assert counts == {"0.weight": 3, "0.bias": 3, "1.weight": 3, "1.bias": 3}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_engine_ends_in_the_same_bits(tiny: Gpipe, tmp_path: Path) -> None:
    for run, words in {
        "threads": (),
        "single": ("engine=single",),
        "offload": ("engine=offload", "engine.to=disk"),
        "processes": ("engine=processes",),
        "balanced": ("balance=time", "deferred_batch_norm=false"),
    }.items():
        answer = tiny("train", "freeze=[0,1]", f"run_dir={run}", "threads=1", *words)
        assert answer.code == 0 and answer.out.count(LINE.removeprefix("frozen ")) == 1, (run, answer.err)
        for file in ("model", "optimizer"):
            first, other = tensors(tmp_path / "threads", file), tensors(tmp_path / run, file)
            assert first.keys() == other.keys()
            assert all(torch.equal(other[name], tensor) for name, tensor in first.items()), run


ACTIVATED = """
from torch import nn
from torch.nn import functional

class NormAct(nn.BatchNorm2d):  # as timm's BatchNormAct2d: tracing would record its forward in train mode
    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, input):
        if self.training:
            self.num_batches_tracked.add_(1)
        return self.act(functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1
        ))

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = NormAct(4)
        self.conv2 = nn.Conv2d(4, 4, 3)
        self.norm2 = NormAct(4)
        self.fc = nn.Linear(4 * 16, num_classes)

    def forward(self, input):
        return self.fc(self.norm2(self.conv2(self.norm(self.conv(input)))).flatten(1))
"""


def test_a_frozen_norm_that_tracing_would_take_apart_keeps_its_statistics(
    tiny: Gpipe, tmp_path: Path, user_module: UserModule
) -> None:
    user_module("activated_for_tests", ACTIVATED)
    words = ("model._target_=activated_for_tests.Net", "allow=[activated_for_tests]")
    answer = tiny("train", *words, "freeze=[conv,norm]", "run_dir=r", "steps=2")
    assert answer.code == 0, answer.err
    saved = tensors(tmp_path / "r")
    assert int(saved["norm.num_batches_tracked"]) == 0 and float(saved["norm.running_mean"].abs().sum()) == 0
    assert int(saved["norm2.num_batches_tracked"]) == 2 * 3
