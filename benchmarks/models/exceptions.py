"""The models that fail a comparison, and why."""

from __future__ import annotations

ONE_LENGTH = "accepts only texts as long as the sample, because "
FULL_MASK = (
    "with a mask of ones, the last bit differs: the original skips it, and torch then uses another kernel"
)
EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "rwkv",
        "causal_lm",
    ): "refused: in evaluation it divides its own weights in place, in training it multiplies them back",
    (
        "longt5",
        "seq2seq",
    ): "the encoder stays whole: into how many blocks it cuts a text depends on the length",
    ("longformer", "masked_lm"): ONE_LENGTH + "the shapes of its windows depend on the length in steps",
    ("funnel", "masked_lm"): ONE_LENGTH + "it pools the length by two, rounded up",
    ("bart", "sequence_classification"): ONE_LENGTH + "it selects the ends of texts by a mask of values",
    ("t5", "sequence_classification"): ONE_LENGTH + "it selects the ends of texts by a mask of values",
    ("hunyuan_v1_dense", "causal_lm"): FULL_MASK,
    ("switch_transformers", "seq2seq"): FULL_MASK,
}
"""By name and task."""
