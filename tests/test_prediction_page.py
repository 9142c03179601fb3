"""The page on prediction holds: its commands work in order, and its lines of plain PyTorch predict the same."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from PIL import Image

from gpipe_cli.vision import torchvision  # noqa: F401 - the page imports it without the repairs of this module
from tests.support.command_line import Gpipe
from tests.test_docs import PREDICTION, commands, text_of

COLORS = {"cat": (200, 120, 40), "dog": (60, 60, 90)}


def make_images() -> None:
    for split in ("train", "test"):
        for name, color in COLORS.items():
            folder = Path("pictures") / split / name
            folder.mkdir(parents=True)
            for index in range(4):
                Image.new("RGB", (40 + index, 30), color).save(folder / f"{index}.jpg")
    Path("photos").mkdir()
    Image.linear_gradient("L").resize((90, 70)).save("photos/1.jpg")
    Image.new("RGBA", (50, 80), (*COLORS["dog"], 99)).save("photos/2.png")


def shortened(line: str) -> list[str]:
    """Fewer steps do not change whether the commands fit together."""
    words = shlex.split(line)[1:]
    return [*words, "steps=1", "batch_size=4", "chunks=2"] if words[0] == "train" else words


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_page_lead_from_training_to_a_prediction_without_gpipe(
    gpipe: Gpipe, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images()
    lines = commands(PREDICTION)
    assert len(lines) >= 10
    for line in lines:
        answer = gpipe(*shortened(line))
        assert answer.code == 0, (line, answer.err)
    rows = gpipe("predict", "weights=model.safetensors", "input=photos/1.jpg", "threads=1", "--json").json
    best = rows["predictions"][0]["classes"][0]
    (block,) = re.findall(r"```python\n(.*?)```", text_of(PREDICTION), flags=re.DOTALL)
    Path("plain.py").write_text(block, encoding="utf-8")
    capsys.readouterr()
    runpy.run_path("plain.py")
    assert capsys.readouterr().out == f"{best['class']} {best['probability']}\n"
