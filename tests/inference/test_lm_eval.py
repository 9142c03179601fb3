"""lm-eval evaluates an exported directory with the task of the docs, offline."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from gpipe_cli.huggingface import import_package
from tests.support.hugging_face_models import save_model, tiny_config
from tests.support.tokenizers import save_tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/fine-tune-hugging-face.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_task_of_the_docs_runs_on_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    task = re.search(r"```yaml\n(task: letters.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert task is not None
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/letters.yaml").write_text(task[1])
    (tmp_path / "letters.jsonl").write_text(f"{json.dumps({'text': 'shall I compare thee'})}\n" * 3)
    save_model(tmp_path / "model", "AutoModelForCausalLM", tiny_config(vocab_size=300))
    save_tokenizer(tmp_path / "model", eos_token="<|endoftext|>")
    lm_eval = import_package("lm_eval")
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "model")},
        tasks=["letters"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        device="cpu",
    )
    bits = results["results"]["letters"]["bits_per_byte,none"]
    assert math.isfinite(bits) and bits > 0
