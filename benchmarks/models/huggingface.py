"""Architectures of Hugging Face transformers, built from tiny configurations."""

from __future__ import annotations

from functools import partial

from torch import nn

from benchmarks.models.huggingface_configs import BLOCKS, BY_TASK, VOCABULARY
from benchmarks.models.subject import Batches, Subject, image_batches, seq2seq_batches, text_batches
from gpipe_cli.vision import torchvision  # noqa: F401 - first: transformers imports torchvision

import transformers  # isort: skip

CLASSES = 5
TASKS = {
    "causal_lm": transformers.AutoModelForCausalLM,
    "masked_lm": transformers.AutoModelForMaskedLM,
    "sequence_classification": transformers.AutoModelForSequenceClassification,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "image_classification": transformers.AutoModelForImageClassification,
}
MULTIPLES = {"longformer": 4}
"""Lengths of texts must be multiples of these: the model pads others, and by how much is a decision on sizes."""


def subjects() -> list[Subject]:
    return [subject(model_type, task) for task, models in BY_TASK.items() for model_type in models]


def subject(model_type: str, task: str) -> Subject:
    is_image = task == "image_classification"
    return Subject(
        "hf",
        model_type,
        task,
        build=partial(build, model_type, task),
        batches=partial(_batches, model_type, task),
        least_layers=BLOCKS * (2 if task == "seq2seq" else 1) + (0 if is_image else 1),
    )


def build(model_type: str, task: str, dropout: float) -> nn.Module:
    labels = {"num_labels": CLASSES} if "classification" in task else {}
    config = transformers.AutoConfig.for_model(model_type, **BY_TASK[task][model_type], **labels)
    _set_dropout(config, dropout)
    model: nn.Module = TASKS[task].from_config(config)
    return model


def _set_dropout(config: transformers.PretrainedConfig, rate: float) -> None:
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            _set_dropout(value, rate)
        elif "drop" not in name:
            continue
        elif isinstance(value, float):
            # Whether a layer is dropped is a decision on random numbers: gpipe keeps those layers together.
            setattr(config, name, 0.0 if "layerdrop" in name else rate)
        elif isinstance(value, list | tuple):  # one per stage
            setattr(config, name, [rate] * len(value))


def _batches(model_type: str, task: str) -> list[Batches]:
    if task == "image_classification":
        options = BY_TASK[task][model_type]
        size = options.get("image_size") or options.get("vision_config", {}).get("image_size", 64)
        return image_batches(3, size, size)
    make = seq2seq_batches if task == "seq2seq" else text_batches
    return make(VOCABULARY, MULTIPLES.get(model_type, 1))
