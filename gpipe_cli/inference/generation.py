"""Continue a text token by token: make the model's input, choose the next token, turn tokens into text as they come.

Nothing is cached between tokens: each costs a forward pass over a window of at most as many tokens as the model takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.build.fit import scores_differ, token_scores
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.data.datasets import generator_for
from gpipe_cli.data.tokenizer import ChatTemplate, Tokenizer
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import ConfigError, NumericError
from gpipe_cli.pytree import ModelInput
from gpipe_cli.values import POSITIONS

_INCOMPLETE = "\ufffd"
"""What a tokenizer makes of half a character."""
_OVERLAP = 8
_BLOCK = 16


@final
@dataclass(frozen=True)
class Sampling:
    """How to draw the next token from the scores of a model."""

    temperature: float
    top_k: int | None
    seed: int

    def choose(self, scores: Tensor, index: int) -> int:
        """Draw token number `index`, counted from the prompt on. scores: [vocabulary]."""
        # On the CPU and in double precision, so that every device draws the same token from the same scores.
        scores = scores.detach().to("cpu", torch.float64)
        if not scores.isfinite().all():
            raise NumericError(f"token {index + 1}: the model's scores are not finite")
        if self.temperature == 0:
            return int(scores.argmax())
        if self.top_k is not None and self.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[-1], -torch.inf)
        # The largest score becomes 0 first: a tiny temperature must not turn it into infinity.
        probabilities = ((scores - scores.max()) / self.temperature).softmax(0)
        return int(probabilities.multinomial(1, generator=generator_for(self.seed, "generate", index)))


@final
@dataclass(frozen=True)
class TextFormat:
    """How a run represents text."""

    tokenizer: Tokenizer
    context: int
    """How many tokens the model takes."""
    sample: ModelInput
    """An input that the model was trained with; those of a generated text have the same structure."""
    chat: ChatTemplate | None = None
    """What makes a text of a prompt that is a message."""

    @staticmethod
    def of(loader: BatchLoader, chat: bool | None = None) -> TextFormat:
        """chat: whether prompts are messages; None: if the model has learned chats."""
        data = loader.data
        if data.tokenizer is None:
            raise ConfigError(
                "data: its samples are not text, so there is nothing to continue; gpipe generate needs a language "
                "model, such as a run of gpipe train model=gpt data=text"
            )
        (context,) = data.shape
        template = (
            getattr(data.tokenizer, "chat", None) if chat or (chat is None and data.has_chats) else None
        )
        if chat and template is None:
            raise ConfigError(
                "chat=true: the tokenizer has no chat template; give data.tokenizer=<directory> with one in "
                "tokenizer_config.json or chat_template.jinja"
            )
        return TextFormat(data.tokenizer, context, loader.traced_batch(), template)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text, or the answer to a message."""
        end = None if self.chat is None else self.chat.end()
        return self.tokenizer.ends if end is None else self.tokenizer.ends | {end}

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, of which there is at least one."""
        if self.chat is not None:
            return self.chat.prompt(text)
        if tokens := self.tokenizer.encode(text):
            return tokens
        if self.tokenizer.start is not None:
            return [self.tokenizer.start]
        raise ConfigError(
            "prompt: is empty, and the tokenizer has no token that begins a text; give a prompt"
        )

    def input(self, tokens: list[int]) -> ModelInput:
        """A mini-batch of one sample: the last tokens, as many as the model takes, and some more after them.

        The scores of a causal model do not depend on what follows, and with few different lengths the ranks of
        engine=processes seldom have to agree on new shapes.
        """
        window = tokens[-self.context :]
        length = min(self.context, -(-len(window) // _BLOCK) * _BLOCK)
        ids = torch.tensor([window + window[-1:] * (length - len(window))])
        if isinstance(self.sample, Tensor):
            return ids
        if isinstance(self.sample, tuple) and len(self.sample) == 2:
            return ids, ids.clone()  # loss=own: any targets will do
        values = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            POSITIONS: torch.arange(length).unsqueeze(0),
            "labels": ids.clone(),
        }
        if not isinstance(self.sample, dict) or not set(self.sample) <= set(values):
            names = ", ".join(self.sample) if isinstance(self.sample, dict) else "a tuple"
            raise ConfigError(
                f"model: its input is {names}; gpipe generate needs one that takes tokens, and a mask or "
                "positions at most"
            )
        return {name: values[name] for name in self.sample}


def generate(
    engine: Engine, text: TextFormat, prompt: Sequence[int], count: int, sampling: Sampling
) -> Iterator[int]:
    """Yield up to `count` tokens that continue the prompt; a token that ends the text comes last."""
    _check_causal(engine, text)
    tokens = list(prompt)
    for index in range(count):

        def choose(output: Any, index: int = index) -> Tensor:
            # A model may have more scores than its tokenizer has tokens.
            last = min(len(tokens), text.context) - 1
            return torch.tensor(
                sampling.choose(token_scores(output)[0, last, : text.tokenizer.vocabulary], index)
            )

        token = int(engine.predict(text.input(tokens), choose))
        tokens.append(token)
        yield token
        if token in text.ends:
            return


def _check_causal(engine: Engine, text: TextFormat) -> None:
    """Refuse a model whose scores for a token depend on the tokens after it, as those of a masked language model do."""
    if scores_differ(engine, [text.input([0, token]) for token in (0, 1)], 0):
        raise ConfigError(
            "model: its scores for a token depend on the tokens after it, so it cannot continue a text; gpipe generate "
            "needs a causal language model"
        )


@final
class TextStream:
    """The text of tokens that come one by one, in pieces that end with a complete character."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.text = ""
        """The text of all tokens, except for an incomplete character at their end."""
        self._tokenizer = tokenizer
        # A tokenizer may drop the space before the first token of a text, so some tokens before the new ones are
        # decoded again with them.
        self._before = list(prompt[-_OVERLAP:])
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that this token completes."""
        self.tokens.append(token)
        self._pending.append(token)
        piece = self._pending_text()
        return "" if piece.endswith(_INCOMPLETE) else self._emit(piece)

    def end(self) -> str:
        """The text that no token has completed."""
        return self._emit(self._pending_text())

    def _pending_text(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._before + self._pending)[len(decode(self._before)) :]

    def _emit(self, piece: str) -> str:
        self.text += piece
        self._before = (self._before + self._pending)[-_OVERLAP:]
        self._pending = []
        return piece
