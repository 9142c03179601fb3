"""Directories of tiny models, as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpipe_cli.huggingface import transformers


def tiny_config(kind: str = "LlamaConfig", **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    }
    return getattr(transformers(), kind)(**{**sizes, **changes})


def save_model(path: Path, auto: str, config: Any, shard: str = "20KB") -> Path:
    """A directory with a model whose every parameter is random, norms and biases too."""
    torch.manual_seed(0)
    model = getattr(transformers(), auto).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(path, max_shard_size=shard)
    return path
