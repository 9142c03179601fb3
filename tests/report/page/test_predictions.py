from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.report.page.predictions import (
    MAX_CLASSES,
    as_png_uri,
    png_uri,
    read_predictions,
    read_text_sample,
)
from gpipe_cli.report.page.render import render_page
from gpipe_cli.report.page.run_record import read_run
from tests.report.page.runs import HOSTILE, write_training

IMAGE = png_uri(bytes(range(12)), 2, 2)


def predictions(**changes: Any) -> dict[str, Any]:
    sample = {"target": 1, "predicted": 0, "confidence": 0.75, "image": IMAGE, "index": 4}
    return {
        "step": 40,
        "class_names": ["cat", "dog"],
        "counts": [[3, 1], [2, 0]],
        "samples": [sample],
        **changes,
    }


def page(tmp_path: Path, name: str, content: dict[str, Any]) -> str:
    run = write_training(tmp_path)
    (run / name).write_text(json.dumps(content), encoding="utf-8")
    return render_page([read_run(run)])


def test_a_classifier_has_a_confusion_matrix_and_samples(tmp_path: Path) -> None:
    text = page(tmp_path, "predictions.json", predictions())
    assert "Confusion matrix after step 40" in text
    assert "dog predicted as cat (2 of 2 samples); cat predicted as dog (1 of 4 samples)." in text
    matrix = text[text.index('<table class="confusion">') :].split("</table>")[0]
    assert re.findall(r'<td class="(\w+)"[^>]*>(\d+)</td>', matrix) == [
        ("hit4", "3"),
        ("miss2", "1"),
        ("miss5", "2"),
    ]
    assert f'<img src="{IMAGE}"' in text and '<span class="wrong">cat (75 %)</span><br>is dog' in text


def test_hostile_names_images_and_texts_stay_text(tmp_path: Path) -> None:
    sample = {"target": 0, "predicted": 1, "image": f"javascript:{HOSTILE}", "text": HOSTILE}
    content = predictions(class_names=[HOSTILE, HOSTILE], samples=[sample])
    text = page(tmp_path, "predictions.json", content)
    assert text.count("<script>") == 1 and "<img" not in text and "javascript:" not in text
    text = page(tmp_path, "sample.json", {"prompt": HOSTILE, "text": HOSTILE, "tokens": 3, "seed": 7})
    assert text.count("<script>") == 1 and "<img" not in text and "3 tokens, seed=7." in text


def test_many_classes_have_a_table_of_pairs(tmp_path: Path) -> None:
    pairs = [{"target": 7, "predicted": 9, "count": 5000}]
    text = page(tmp_path, "predictions.json", {"step": 1, "classes": 500, "pairs": pairs})
    assert "<td>7</td><td>9</td><td>5,000</td>" in text and "Held-out samples" not in text


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"counts": [[1, 2], [3]]},
        {"counts": "x"},
        {"counts": [[0] * (MAX_CLASSES + 1)] * (MAX_CLASSES + 1)},
        {"pairs": [{"target": -1, "predicted": 2, "count": 3}]},
        {"samples": [{"target": 1}]},
    ],
)
def test_what_cannot_be_shown_is_left_out(content: dict[str, Any]) -> None:
    assert read_predictions(content) is None


def test_a_language_model_shows_what_it_wrote(tmp_path: Path) -> None:
    content = {"prompt": "Once ", "text": "upon", "tokens": 4, "temperature": 0.8, "top_k": 40, "seed": 3}
    text = page(tmp_path, "sample.json", content)
    assert "4 tokens, temperature=0.8, top_k=40, seed=3." in text
    assert '<span class="prompt">Once </span>upon</pre>' in text
    assert read_text_sample({"prompt": "Once"}) == {}


@pytest.mark.parametrize(
    "value",
    [
        None,
        "data:image/svg+xml;base64,AAAA",
        "data:image/png;base64,",
        'data:image/png;base64,AA" onload="x',
        "data:image/png;base64," + "A" * 2**18,
        "https://example.org/x.png",
    ],
)
def test_only_small_png_images_are_shown(value: Any) -> None:
    assert as_png_uri(value) == "" and as_png_uri(IMAGE) == IMAGE
