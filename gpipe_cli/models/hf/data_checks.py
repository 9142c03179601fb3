"""Whether data fits a model of transformers: what a sample is, the tokens the model knows, and its positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.weights import shape_text


def check_input_shape(task: str, path: str, input_shape: tuple[int, ...]) -> None:
    takes_images = task == "image_classification"
    if len(input_shape) == (3 if takes_images else 1):
        return
    kind, cure = (
        ("images", "data=image_folder loss=cross_entropy")
        if takes_images
        else ("sequences of tokens", "data=text loss=token_cross_entropy")
    )
    raise ConfigError(
        f"model.path={path}: task={task} takes {kind}, and the data has {shape_text(input_shape)}; choose data and a "
        f"loss that fit, such as {cure}"
    )


def check_vocabulary(config: Any, path: str, tokens: int) -> None:
    """tokens: how many the data has."""
    known = getattr(config.get_text_config(), "vocab_size", None)
    if isinstance(known, int) and tokens > known:
        raise ConfigError(
            f"model.path={path}: knows {known} tokens (vocab_size), and the data has {tokens}; give the tokenizer that "
            f"the model was trained with, such as data.tokenizer={path}"
        )


def check_targets(task: str, tokenizer: Any, say: Callable[[str], None]) -> None:
    """gpipe's own data sets of text, which alone have a tokenizer, ask for the next token of each."""
    if tokenizer is not None and task == "seq2seq":
        raise ConfigError(
            "model.task=seq2seq: data=text and data=jsonl have no input for the decoder; give data of your own whose "
            "inputs are {input_ids, attention_mask, decoder_input_ids}, with data._target_"
        )
    if tokenizer is not None and task == "masked_lm":
        say(
            "model.task=masked_lm: data=text and data=jsonl ask for the next token, which this model sees; give data "
            "of your own that masks tokens, with data._target_"
        )


def ignored_tokenizer(directory: Path, tokenizer: Any) -> str | None:
    """A warning if the data is bytes, which mean nothing to a model that was trained with a tokenizer."""
    if getattr(tokenizer, "digest", None) != "bytes" or not (directory / "tokenizer.json").exists():
        return None
    return (
        "data.tokenizer=null: every byte is a token, and the model was trained with another tokenizer; give "
        f"data.tokenizer={directory}"
    )


def check_context(config: Any, model: nn.Module, path: str, context: int) -> None:
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    # Models like RoBERTa count positions from the padding token on, so the first rows of the table are not for tokens.
    offset = next(
        (
            part.padding_idx + 1
            for name, part in model.named_modules()
            if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None
        ),
        0,
    )
    if isinstance(longest, int) and context > longest - offset > 0:
        raise ConfigError(
            f"data.context={context}: the model has {longest - offset} positions (max_position_embeddings of {path}); "
            f"give data.context={longest - offset} or less"
        )
