"""The class of transformers for a directory: that of its configuration for a task, and whether data fits it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import transformers
from gpipe_cli.models.weights import shape_text

TASKS = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
"""What transformers calls the classes for each task. A configuration that names no class means the first that it has:
BERT also has a causal and T5 also has a classifying variant."""
CLASSIFICATION = frozenset({"image_classification", "sequence_classification"})


def model_class(config: Any, task: str | None, path: str) -> tuple[str, type[Any]]:
    """The task, by default that of the class that the configuration names, and the class for it."""
    classes = {name: _classes(config, mapping) for name, mapping in TASKS.items()}
    possible = [name for name, of_task in classes.items() if of_task]
    if task is not None and task not in TASKS:
        raise ConfigError(f"model.task={task}: must be one of: {', '.join(TASKS)}")
    if not possible:
        raise ConfigError(
            f"model.path={path}: transformers has no {config.model_type} for any of: {', '.join(TASKS)}"
        )
    if task is not None and task not in possible:
        raise ConfigError(f"model.task={task}: a {config.model_type} is for {' or '.join(possible)}")
    saved = config.architectures or []
    chosen = [task] if task else [name for name in possible if _named(classes[name], saved)]
    if not chosen:
        if saved and not saved[0].endswith("Model"):
            raise ConfigError(
                f"model.path={path}: was saved as {saved[0]}; give model.task, one of: {', '.join(possible)}"
            )
        chosen = possible
    of_task = classes[chosen[0]]
    return chosen[0], next(iter(_named(of_task, saved)), of_task[0])


def _classes(config: Any, mapping: str) -> list[type[Any]]:
    known = getattr(transformers(), mapping)
    if type(config) not in known:
        return []
    classes = known[type(config)]
    return list(classes) if isinstance(classes, tuple | list) else [classes]


def _named(classes: list[type[Any]], names: list[str]) -> list[type[Any]]:
    return [each for each in classes if each.__name__ in names]


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
