"""The pages on fine-tuning hold: their commands work in order."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpipe_cli import huggingface
from tests.support.command_line import Gpipe
from tests.test_docs import FINE_TUNING, FREEZING, TOP, commands, text_of

MAKER = TOP / "examples" / "tiny_llama" / "make_tiny_llama.py"


def shortened(line: str) -> list[str]:
    """Fewer steps do not change whether the commands fit together."""
    words = shlex.split(line)[1:]
    if words[0] == "train" and "--dry-run" not in words:
        words = [word for word in words if not word.startswith("steps=")]
        words += ["steps=2" if any(word.startswith("resume=") for word in words) else "steps=1"]
    return words


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_lead_from_a_directory_to_a_directory(gpipe: Gpipe, tmp_path: Path) -> None:
    runpy.run_path(str(MAKER))["make_directory"](Path("tiny-llama"))
    timm = huggingface.import_package("timm")
    save_file(timm.create_model("resnet10t").state_dict(), "resnet10t.safetensors")
    (config,) = re.findall(r"^```json\n(.*?)^```", text_of(FINE_TUNING), flags=re.DOTALL | re.MULTILINE)
    Path("llama-7b").mkdir()
    Path("llama-7b/config.json").write_text(config, encoding="utf-8")
    lines = commands(FINE_TUNING)
    assert len(lines) >= 9
    for line in lines:
        answer = gpipe(*shortened(line))
        assert answer.code == 0, (line, answer.err)
        if "llama-7b" in line:
            printed = answer.out.partition("memory, estimated\n")[2].partition("steps")[0].rstrip()
            assert printed in text_of(FINE_TUNING), printed
    exported = huggingface.transformers().AutoModelForCausalLM.from_pretrained("tuned-llama")
    (snapshot,) = (tmp_path / "tuned" / "snapshots").glob("*2/model.safetensors")
    saved = load_file(snapshot)
    own = exported.state_dict()
    assert saved.keys() <= own.keys()
    assert all(torch.equal(saved[name], own[name]) for name in saved)
    assert json.loads(Path("adapter/adapter_config.json").read_text(encoding="utf-8"))["r"] == 8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_on_weights_and_freezing_print_what_the_page_shows(gpipe: Gpipe) -> None:
    printed = ""
    for line in commands(FREEZING):
        words = [word for word in shlex.split(line)[1:] if not word.startswith(("steps=", "epochs="))]
        resumes = any(word.startswith("resume=") for word in words)
        short = [f"steps={2 if resumes else 1}"] if words[0] == "train" else []
        answer = gpipe(*words, *short)
        assert answer.code == 0, (line, answer.err)
        printed += answer.err
    shown = re.findall(r"^(?:loaded|frozen) .*$", text_of(FREEZING), flags=re.MULTILINE)
    assert len(shown) == 2 and all(f"{line}\n" in printed for line in shown), printed
