"""What gpipe needs besides the model: its scores for all tokens, and a function that builds it."""

from nanogpt import GPT, GPTConfig
from torch import Tensor


class Scores(GPT):
    """The scores of all tokens, which gpipe compares with the targets on the last device."""

    def forward(self, idx: Tensor) -> Tensor:
        return super().forward(idx, idx)[0]


def build(num_classes: int, input_shape: tuple[int], n_layer: int = 6, n_embd: int = 384) -> GPT:
    return Scores(GPTConfig(input_shape[0], num_classes, n_layer, n_head=6, n_embd=n_embd))
