"""Architectures of Hugging Face transformers, each with a configuration small enough to compare within seconds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from benchmarks.models.subject import Batches, Subject, image_batches, seq2seq_batches, text_batches
from gpipe_cli.vision import torchvision  # noqa: F401 - first: transformers imports torchvision

import transformers  # isort: skip

VOCABULARY = 64
CLASSES = 5
BLOCKS = 3
TASKS = {
    "causal_lm": transformers.AutoModelForCausalLM,
    "masked_lm": transformers.AutoModelForMaskedLM,
    "sequence_classification": transformers.AutoModelForSequenceClassification,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "image_classification": transformers.AutoModelForImageClassification,
}
TEXT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": BLOCKS,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: Mapping[str, Any] = {**TEXT, "num_key_value_heads": 2}
"""Decoders whose heads share keys and values."""
EXPERTS: Mapping[str, Any] = {
    **GROUPED,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LATENT: Mapping[str, Any] = {
    **TEXT,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
"""DeepSeek: attention through a latent vector, and experts after the first block."""
ENCODER_DECODER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": BLOCKS,
    "decoder_layers": BLOCKS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": BLOCKS,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
IMAGE: Mapping[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
}
STAGES: Mapping[str, Any] = {"depths": [1, 2, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
"""Image models of four stages."""

SWIN: Mapping[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}

CAUSAL_LM: Mapping[str, Mapping[str, Any]] = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 6},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 6},
    "gemma3_text": {**GROUPED, "head_dim": 8, "sliding_window": 6},
    "phi": TEXT,
    "phi3": GROUPED,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neo": {
        **TEXT,
        "num_layers": BLOCKS,
        "num_heads": 4,
        "attention_types": [[["global", "local", "global"], 1]],
        "window_size": 4,
    },
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "rotary_dim": 4},
    "gpt_neox": TEXT,
    "opt": {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": BLOCKS, "n_head": 4},
    "falcon": {**TEXT, "new_decoder_architecture": False, "multi_query": True},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": BLOCKS, "n_heads": 4, "max_seq_len": 64},
    "starcoder2": GROUPED,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "stablelm": GROUPED,
    "cohere": GROUPED,
    "cohere2": {**GROUPED, "sliding_window": 6},
    "granite": GROUPED,
    "glm": {**GROUPED, "head_dim": 8},
    "smollm3": GROUPED,
    "nemotron": GROUPED,
    "persimmon": TEXT,
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "olmoe": EXPERTS,
    "granitemoe": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        **GROUPED,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": BLOCKS, "state_size": 4},
    "rwkv": {
        "vocab_size": VOCABULARY,
        "context_length": 64,
        "hidden_size": 32,
        "num_hidden_layers": BLOCKS,
        "attention_hidden_size": 32,
        "intermediate_size": 48,
    },
    "biogpt": TEXT,
    "xglm": {
        **TEXT,
        "d_model": 32,
        "ffn_dim": 48,
        "num_layers": BLOCKS,
        "attention_heads": 4,
    },
    "openai-gpt": GPT,
    "xlnet": {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": BLOCKS, "n_head": 4, "d_inner": 48},
}
MASKED_LM: Mapping[str, Mapping[str, Any]] = {
    "bert": TEXT,
    "roberta": TEXT,
    "xlm-roberta": TEXT,
    "camembert": TEXT,
    "distilbert": {"vocab_size": VOCABULARY, "dim": 32, "n_layers": BLOCKS, "n_heads": 4, "hidden_dim": 48},
    "albert": {**TEXT, "embedding_size": 16},
    "electra": {**TEXT, "embedding_size": 16},
    "deberta": {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deberta-v2": {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "mpnet": TEXT,
    "modernbert": {**TEXT, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2},
    "longformer": {**TEXT, "attention_window": 4},
    "big_bird": {**TEXT, "attention_type": "original_full"},
    "funnel": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "n_head": 4,
        "d_head": 8,
        "d_inner": 48,
        "block_sizes": [1, 1, 1],
        "num_decoder_layers": 1,
    },
    "convbert": {**TEXT, "embedding_size": 32},
    "ernie": TEXT,
    "fnet": TEXT,
    "mobilebert": {**TEXT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "squeezebert": {**TEXT, "embedding_size": 32},
}
SEQ2SEQ: Mapping[str, Mapping[str, Any]] = {
    "t5": T5,
    "mt5": T5,
    "umt5": T5,
    "bart": ENCODER_DECODER,
    "mbart": ENCODER_DECODER,
    "pegasus": ENCODER_DECODER,
    "marian": ENCODER_DECODER,
    "m2m_100": ENCODER_DECODER,
    "blenderbot": ENCODER_DECODER,
    "longt5": {**T5, "local_radius": 3},
}
SEQUENCE_CLASSIFICATION: Mapping[str, Mapping[str, Any]] = {
    "llama": GROUPED,
    "gpt2": {**CAUSAL_LM["gpt2"], "pad_token_id": 0},
    "qwen2": GROUPED,
    "bert": TEXT,
    "roberta": TEXT,
    "distilbert": MASKED_LM["distilbert"],
    "deberta-v2": MASKED_LM["deberta-v2"],
    "modernbert": MASKED_LM["modernbert"],
    "xlnet": CAUSAL_LM["xlnet"],
    "bart": ENCODER_DECODER,
    "t5": T5,
}
IMAGE_CLASSIFICATION: Mapping[str, Mapping[str, Any]] = {
    "vit": IMAGE,
    "deit": {**IMAGE, "architectures": ["DeiTForImageClassification"]},
    "beit": IMAGE,
    "dinov2": IMAGE,
    "siglip": {"vision_config": IMAGE},
    "clip": {"vision_config": IMAGE},
    "swin": SWIN,
    "swinv2": SWIN,
    "convnext": {**STAGES, "image_size": 64},
    "convnextv2": {**STAGES, "image_size": 64},
    "resnet": {**STAGES, "embedding_size": 8},
    "regnet": {**STAGES, "embedding_size": 8, "groups_width": 8},
    "mobilenet_v1": {"image_size": 64, "depth_multiplier": 0.25},
    "mobilenet_v2": {"image_size": 64, "depth_multiplier": 0.25},
    "mobilevit": {
        "image_size": 64,
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64],
    },
    "segformer": {**STAGES, "depths": [1, 1, 1, 1], "decoder_hidden_size": 16},
    "poolformer": {**STAGES},
    "levit": {
        "architectures": ["LevitForImageClassification"],
        "image_size": 64,
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
    },
    "efficientnet": {
        "image_size": 64,
        "width_coefficient": 0.25,
        "depth_coefficient": 0.5,
        "hidden_dim": 320,
    },
    "focalnet": {
        "image_size": 32,
        "embed_dim": 8,
        "depths": [1, 1],
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
    },
    "pvt": {
        "image_size": 32,
        "hidden_sizes": [8, 16, 24, 32],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
    },
    "cvt": {
        "embed_dim": [8, 16, 24],
        "num_heads": [1, 2, 2],
        "depth": [1, 2, 3],
        "cls_token": [False, False, True],
    },
}
BY_TASK = {
    "causal_lm": CAUSAL_LM,
    "masked_lm": MASKED_LM,
    "seq2seq": SEQ2SEQ,
    "sequence_classification": SEQUENCE_CLASSIFICATION,
    "image_classification": IMAGE_CLASSIFICATION,
}


MULTIPLES = {"longformer": 4}
"""Lengths of texts must be multiples of these: the model pads others, and by how much is a decision on sizes."""


def subjects() -> list[Subject]:
    return [_subject(model_type, task) for task, models in BY_TASK.items() for model_type in models]


def _subject(model_type: str, task: str) -> Subject:
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
        elif "drop" in name and "layerdrop" not in name and isinstance(value, float):
            setattr(config, name, rate)


def _batches(model_type: str, task: str) -> list[Batches]:
    if task == "image_classification":
        options = BY_TASK[task][model_type]
        size = options.get("image_size") or options.get("vision_config", {}).get("image_size", 64)
        return image_batches(3, size, size)
    make = seq2seq_batches if task == "seq2seq" else text_batches
    return make(VOCABULARY, MULTIPLES.get(model_type, 1))
