from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from gpipe_cli.data.tokenizer import ByteTokenizer
from gpipe_cli.errors import ConfigError, NumericError
from gpipe_cli.inference.generation import Sampling, TextFormat, TextStream, generate

SCORES = torch.tensor([0.0, 3.0, 1.0, 2.0])


def draws(sampling: Sampling, scores: torch.Tensor = SCORES, count: int = 400) -> list[int]:
    return [sampling.choose(scores, index) for index in range(count)]


def test_a_temperature_of_zero_takes_the_likeliest_token() -> None:
    assert set(draws(Sampling(temperature=0, top_k=None, seed=0))) == {1}


@pytest.mark.parametrize("temperature", [5e-324, 1e-30])
def test_a_tiny_temperature_is_nearly_zero(temperature: float) -> None:
    assert set(draws(Sampling(temperature, top_k=None, seed=0))) == {1}


def test_tokens_are_drawn_as_often_as_their_scores_say() -> None:
    drawn = torch.tensor(draws(Sampling(temperature=2.0, top_k=None, seed=0), count=4000))
    assert torch.allclose(drawn.bincount(minlength=4) / 4000, (SCORES / 2).softmax(0), atol=0.03)


def test_only_the_likeliest_tokens_are_drawn() -> None:
    assert set(draws(Sampling(temperature=10.0, top_k=2, seed=0))) == {1, 3}
    assert set(draws(Sampling(temperature=10.0, top_k=9, seed=0))) == {0, 1, 2, 3}


def test_the_seed_decides_what_is_drawn() -> None:
    first, again, other = (draws(Sampling(temperature=1.0, top_k=None, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_an_error(wrong: float) -> None:
    with pytest.raises(NumericError, match=r"token 3: the model's scores are not finite"):
        Sampling(0.0, None, 0).choose(torch.tensor([1.0, wrong]), 2)


def test_text_comes_in_complete_characters() -> None:
    stream = TextStream(ByteTokenizer(), list(b"the prompt "))
    pieces = [stream.add(token) for token in "aé日!".encode()]
    assert pieces == ["a", "", "é", "", "", "日", "!"]
    assert (stream.text, stream.end()) == ("aé日!", "")


def test_what_never_becomes_a_character_is_replaced() -> None:
    stream = TextStream(ByteTokenizer(), [])
    assert [stream.add(token) for token in (0xE6, 0x97, ord("a"), 0xC3)] == ["", "", "\ufffda", ""]
    assert (stream.end(), stream.text) == ("\ufffd", "\ufffda\ufffd")
    assert stream.tokens == [0xE6, 0x97, ord("a"), 0xC3]


class SpacedWords:
    """Decodes as sentencepiece does: a token carries the space before it, and the first space of a text is dropped."""

    vocabulary, start, ends = 4, None, frozenset({3})

    def encode(self, text: str) -> list[int]:
        return [("one", "two", "three").index(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(("one", "two", "three", "")[token] for token in tokens)


def test_the_space_before_the_first_new_word_is_kept() -> None:
    stream = TextStream(SpacedWords(), [0])
    assert [stream.add(1), stream.add(2)] == [" two", " three"]


@dataclass
class CountingEngine:
    """The next token is the last one plus 1; remembers its inputs."""

    inputs: list[list[int]]
    output: Callable[[torch.Tensor], Any] = lambda scores: scores

    def predict(self, input: Any, choose: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        self.inputs.append(input[0].tolist())
        return choose(self.output(torch.nn.functional.one_hot(input + 1, 300).double()))


def with_sums(scores: torch.Tensor) -> torch.Tensor:
    """As a model without a causal mask: every token sees all others."""
    return scores + scores.sum(1, keepdim=True)


ZEROS = torch.zeros(2, 3, dtype=torch.int64)


def continued(engine: Any, tokenizer: Any, prompt: list[int], count: int) -> list[int]:
    return list(generate(engine, TextFormat(tokenizer, 3, ZEROS), prompt, count, Sampling(0.0, None, 0)))


def test_the_model_sees_a_window_that_moves_with_the_text() -> None:
    engine = CountingEngine([])
    assert continued(engine, ByteTokenizer(), [5], 4) == [6, 7, 8, 9]
    assert engine.inputs[2:] == [[5, 5, 5], [5, 6, 6], [5, 6, 7], [6, 7, 8]]


def test_inputs_have_few_different_lengths() -> None:
    text = TextFormat(ByteTokenizer(), 40, ZEROS)
    lengths = [cast(torch.Tensor, text.input([1] * count)).shape[1] for count in (1, 15, 16, 17, 32, 33, 41)]
    assert lengths == [16, 16, 16, 32, 32, 40, 40]


def test_a_token_that_ends_the_text_is_the_last() -> None:
    assert continued(CountingEngine([]), SpacedWords(), [0], 9) == [1, 2, 3]


def test_a_token_that_the_tokenizer_does_not_know_is_never_chosen() -> None:
    assert continued(CountingEngine([]), ByteTokenizer(), [255], 1) == [0]


def test_a_model_that_takes_a_mask_gets_one() -> None:
    text = TextFormat(ByteTokenizer(), 3, {"input_ids": ZEROS, "attention_mask": ZEROS})
    input = text.input([5, 6])
    assert isinstance(input, dict)
    assert {name: value.tolist() for name, value in input.items()} == {
        "input_ids": [[5, 6, 6]],
        "attention_mask": [[1, 1, 1]],
    }


def test_a_model_that_takes_more_than_a_text_is_refused() -> None:
    text = TextFormat(ByteTokenizer(), 3, {"input_ids": ZEROS, "decoder_input_ids": ZEROS})
    with pytest.raises(
        ConfigError, match=r"model: its input is input_ids, decoder_input_ids; gpipe generate"
    ):
        text.input([5])


def test_an_empty_prompt_begins_with_the_first_token_of_a_text() -> None:
    assert TextFormat(ByteTokenizer(), 3, ZEROS).encode("") == [10]
    with pytest.raises(
        ConfigError, match=r"prompt: is empty, and the tokenizer has no token that begins a text"
    ):
        TextFormat(SpacedWords(), 3, ZEROS).encode("")


def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model: its scores for a token depend on the tokens after it"):
        continued(CountingEngine([], with_sums), ByteTokenizer(), [5], 1)


def test_a_model_without_scores_for_each_token_is_refused() -> None:
    for output, says in (
        (lambda scores: scores[0], r"returns \[3, 300\]"),
        (lambda scores: None, "returns NoneType"),
    ):
        with pytest.raises(ConfigError, match=rf"model: {says}; a language model returns scores"):
            continued(CountingEngine([], output), ByteTokenizer(), [5], 1)
