from __future__ import annotations

import io
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpipe_cli.huggingface import transformers
from gpipe_cli.inference import generation
from tests.support.command_line import Gpipe
from tests.support.trained_runs import GPT, TrainedRun


@pytest.fixture
def trained(trained_run: TrainedRun) -> Path:
    return trained_run("gpt")


@pytest.fixture
def generate(gpipe: Gpipe, trained: Path) -> Gpipe:
    return lambda *words: gpipe("generate", "run=run", "tokens=12", *words)


def test_the_text_goes_to_stdout_and_the_status_to_stderr(generate: Gpipe) -> None:
    answer, as_json = generate("prompt=Shall I"), generate("prompt=Shall I", "--json")
    assert answer.code == as_json.code == 0
    summary = as_json.json
    assert answer.out == f"{summary['text']}\n" and as_json.err.startswith("best: eval loss ")
    assert answer.err.startswith(as_json.err + "12 tokens in ") and answer.err.count("\n") == 2
    assert (summary["prompt"], summary["tokens"], summary["ended"]) == ("Shall I", 12, False)
    assert summary["weights"].endswith("step-00000003/model.safetensors")


@pytest.mark.parametrize(
    "words",
    [
        ["partitions=4"],
        ["devices=[cpu,cpu,cpu]"],
        ["engine=single"],
        ["engine=offload", "engine.slices=2"],
        ["engine=offload", "engine.to=disk"],
        pytest.param(["engine=processes"], marks=pytest.mark.slow),
    ],
)
def test_the_split_and_the_engine_do_not_change_the_text(generate: Gpipe, words: list[str]) -> None:
    assert (
        generate("prompt=When", *words, "--json").json["text"]
        == generate("prompt=When", "--json").json["text"]
    )


@pytest.mark.slow
def test_ranks_print_the_text_once_and_rank_0_reads_the_prompt(generate: Gpipe) -> None:
    words = ["generate", "run=run", "tokens=12", "prompt=-", "engine=processes"]
    done = subprocess.run(
        [sys.executable, "-m", "gpipe_cli", *words],
        input="When\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, generate("prompt=When").out), done.stderr


@pytest.mark.slow
def test_the_seed_changes_the_text_and_a_temperature_of_zero_ignores_it(generate: Gpipe) -> None:
    def text(*words: str) -> str:
        return str(generate("prompt=When", *words, "--json").json["text"])

    assert text("temperature=9", "top_k=null", "seed=1") != text("temperature=9", "top_k=null", "seed=2")
    assert text("temperature=0", "seed=1") == text("temperature=0", "seed=2") == text("top_k=1")


@pytest.mark.parametrize(
    "prompt", ["", "it's {x: [1], b} = \\", "${oc.env:HOME} \\${x", "日本\n", "null", "'quoted'"]
)
def test_a_prompt_is_taken_as_it_is(generate: Gpipe, prompt: str) -> None:
    assert generate(f"prompt={prompt}", "--json").json["prompt"] == prompt


def test_a_prompt_is_read_from_stdin(generate: Gpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Shall\nI\n")))
    assert generate("prompt=-", "--json").json["prompt"] == "Shall\nI"
    monkeypatch.setattr(sys, "stdin", None)
    assert generate("prompt=-", "--json").json["prompt"] == ""


def test_a_prompt_that_is_too_long_keeps_its_end(generate: Gpipe) -> None:
    answer, short = generate("prompt=Shall I compare"), generate("prompt= compare")
    assert answer.out == short.out
    assert "the prompt has 15 tokens; the model takes 8, so it sees the last 8\n" in answer.err


def test_an_interrupt_keeps_what_was_printed(generate: Gpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    add = generation.TextStream.add

    def interrupted(stream: generation.TextStream, token: int) -> str:
        if len(stream.tokens) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return add(stream, token)

    whole = generate("prompt=When").out
    monkeypatch.setattr(generation.TextStream, "add", interrupted)
    answer = generate("prompt=When")
    assert answer.code == 130 and answer.err.endswith(" of 3\ngpipe: stopped by Ctrl-C\n")
    assert answer.out == f"{whole[:5]}\n"


def test_a_snapshot_and_a_file_of_weights_generate_the_same_text(
    gpipe: Gpipe, generate: Gpipe, trained: Path
) -> None:
    text = generate("prompt=When").out
    (snapshot,) = trained.glob("snapshots/*3")
    assert gpipe("generate", f"snapshot={snapshot}", "tokens=12", "prompt=When").out == text
    weights = f"weights={snapshot / 'model.safetensors'}"
    assert gpipe("generate", weights, *GPT, "tokens=12", "prompt=When").out == text


def test_a_dry_run_shows_the_partitions(generate: Gpipe) -> None:
    assert [row["layers"] for row in generate("--dry-run", "--json").json["partitions"]] == [2, 2]
    assert generate("--dry-run").out.startswith("partitions\n")


def test_a_run_that_is_no_language_model_is_refused(tiny: Gpipe, tiny_run: Path) -> None:
    answer = tiny("generate", "run=run", "allow=[tiny_for_tests]")
    assert answer.code == 2
    assert answer.err.startswith("last: step 6\ngpipe: error: data: its samples are not text")


def test_damaged_weights_end_with_code_4(gpipe: Gpipe, trained: Path) -> None:
    for path in trained.glob("snapshots/*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    answer = gpipe("generate", "run=run")
    assert (answer.code, answer.out) == (4, "") and "its best snapshot (eval loss" in answer.err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_model_of_hugging_face_continues_a_text_as_transformers_does(gpipe: Gpipe) -> None:
    script = Path(__file__).parents[2] / "examples" / "tiny_llama" / "make_tiny_llama.py"
    runpy.run_path(str(script))["make_directory"](Path("tiny"))
    words = ("data.stride=400", "steps=2", "threads=1", "run_dir=run", "batch_size=8")
    assert gpipe("train", "recipe=hf_finetune", "model.path=tiny", *words).code == 0
    assert gpipe("export", "run=run", "format=hf", "out=exported").code == 0
    model = transformers().AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = transformers().AutoTokenizer.from_pretrained("exported")
    prompt = tokenizer("Shall I", return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    continuation = tokenizer.decode(tokens, skip_special_tokens=True).removeprefix("Shall I")
    for split in (["partitions=4"], ["engine=single"], ["engine=processes"]):
        answer = gpipe(
            "generate", "run=run", "prompt=Shall I", "tokens=20", "temperature=0", *split, "--json"
        )
        assert (answer.code, answer.json["text"]) == (0, continuation), (split, answer.err)


@pytest.mark.slow
def test_a_masked_language_model_is_refused(gpipe: Gpipe) -> None:
    package = transformers()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    package.BertForMaskedLM(package.BertConfig(vocab_size=256, **sizes)).save_pretrained("bert")
    words = ("model=hf", "model.path=bert", "steps=1", "run_dir=run", "data.stride=400", "batch_size=8")
    assert gpipe("train", *words).code == 0
    answer = gpipe("generate", "run=run", "prompt=a")
    assert (answer.code, answer.out) == (2, "")
    assert "model: its scores for a token depend on the tokens after it" in answer.err
