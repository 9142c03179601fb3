"""What gpipe needs besides the model: a function that builds it."""

from nanogpt import GPT, GPTConfig


def build(num_classes: int, input_shape: tuple[int], n_layer: int = 6, n_embd: int = 384) -> GPT:
    return GPT(GPTConfig(input_shape[0], num_classes, n_layer, n_head=6, n_embd=n_embd))
