from __future__ import annotations

import io
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpipe_cli.data.tokenizer import read_tokenizer
from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import transformers
from gpipe_cli.inference import generation
from gpipe_cli.inference.generation import TextFormat
from tests.support.command_line import Gpipe
from tests.support.hugging_face_models import save_model, tiny_config
from tests.support.tokenizers import CHATML, save_tokenizer
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


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = save_tokenizer(tmp_path / "llama", eos_token="<|endoftext|>", chat_template=CHATML)
    tokens = read_tokenizer(str(path)).vocabulary
    return save_model(path, "AutoModelForCausalLM", tiny_config(vocab_size=tokens, eos_token_id=0))


def test_a_directory_is_run_as_it_is(gpipe: Gpipe, directory: Path) -> None:
    """With the tokens that transformers generates from the same prompt, as a text and as a message."""
    model = transformers().AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers().AutoTokenizer.from_pretrained(directory)
    message = [{"role": "user", "content": "shall I"}]
    for chat, text in (
        ("false", "shall I"),
        ("true", tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)),
    ):
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        expected = model.generate(
            **prompt, max_new_tokens=6, do_sample=False, eos_token_id=[0, 2] if chat == "true" else 0
        )[0, prompt.input_ids.shape[1] :]
        words = (f"model.path={directory}", "prompt=shall I", "tokens=6", "temperature=0", "--json")
        answer = gpipe("generate", *words, f"chat={chat}", "partitions=2")
        assert answer.code == 0, answer.err
        assert answer.json["prompt_tokens"] == prompt.input_ids.shape[1]
        assert answer.json["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert answer.json["weights"] == str(directory)


def test_a_run_that_learned_chats_takes_messages(gpipe: Gpipe, directory: Path, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "thee"}, {"role": "assistant", "content": "I"}]] * 8
    (tmp_path / "chats").write_text("".join(f"{json.dumps({'messages': chat})}\n" for chat in chats))
    run, keys = tmp_path / "run", ("data.field=messages", "data.context=24", "data.pack=false")
    answer = gpipe(
        "train", "model=hf", f"model.path={directory}", "data=rows", f"data.path={tmp_path / 'chats'}", "steps=1",
        *keys, "batch_size=2", f"data.cache={tmp_path}", f"run_dir={run}",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert f"gpipe generate run={run} prompt=..." in answer.out
    lengths = [
        gpipe("generate", f"run={run}", "prompt=thee", "tokens=1", "--json", *words).json["prompt_tokens"]
        for words in ([], ["chat=true"], ["chat=false"])
    ]
    assert lengths[0] == lengths[1] > lengths[2]


def test_a_message_needs_a_template(gpipe: Gpipe, directory: Path) -> None:
    save_tokenizer(directory, eos_token="<|endoftext|>")
    answer = gpipe("generate", f"model.path={directory}", "prompt=a", "chat=true")
    assert (
        answer.code == 2
        and "chat=true: the tokenizer has no chat template; give data.tokenizer=" in answer.err
    )


def test_an_answer_ends_with_the_token_of_the_template(directory: Path) -> None:
    tokenizer = read_tokenizer(str(directory))
    assert tokenizer.chat is not None and tokenizer.chat.end() == 2  # <|im_end|>, not the eos token
    text = TextFormat(tokenizer, 8, torch.zeros(1, 8), tokenizer.chat)
    assert text.ends == {0, 2}


def test_a_template_runs_nothing(directory: Path) -> None:
    """transformers renders it in a sandbox."""
    save_tokenizer(directory, chat_template="{{ messages.__class__.__mro__[-1].__subclasses__() }}")
    chat = read_tokenizer(str(directory)).chat
    assert chat is not None
    with pytest.raises(
        ConfigError, match=r"chat=true: the chat template cannot render the messages: .*unsafe"
    ):
        chat.prompt("a")
