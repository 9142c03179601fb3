"""Make a directory like those of Hugging Face, small enough for any machine, to try gpipe without a download.

    python make_tiny_llama.py tiny-llama
    gpipe train recipe=hf_finetune model.path=tiny-llama optimizer.lr=0.003

The directory has config.json, model.safetensors and a tokenizer with a chat template. The model is a Llama of 1.3
million random parameters, and its tokenizer is trained on the text that gpipe bundles.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import gpipe_cli
from gpipe_cli.huggingface import transformers

TEXT = Path(gpipe_cli.__file__).parent / "data" / "files" / "sonnets.txt"
VOCABULARY = 512
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> Any:
    """Byte-level BPE, as Llama 3 has it: any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(TEXT)], trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS, chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    config = transformers().LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers().LlamaForCausalLM(config)


def make_directory(directory: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    make_model(tokenizer).save_pretrained(directory)


if __name__ == "__main__":
    make_directory(Path(sys.argv[1] if len(sys.argv) > 1 else "tiny-llama"))
