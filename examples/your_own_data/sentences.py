"""An example of samples of different lengths, and of a model that takes several tensors; see your-own-data.md.

gpipe train data=sentences:build model=sentences:tagger loss=token_cross_entropy
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gpipe_cli.data.datasets import Data

WORDS = 20
IGNORED = -100  # no loss is computed for such a label


class Sentences:
    """Random words; the label of a word is the word before it, which a model can learn to look up."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 17, (count,), generator=generator).tolist()
        self._sentences = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]
        self.longest = max(range(count), key=lengths.__getitem__)

    def __len__(self) -> int:
        return len(self._sentences)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return {name: tensor[0] for name, tensor in inputs.items()}, targets[0]

    def batch(self, indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Pad the sentences to the longest of them."""
        sentences = [self._sentences[index] for index in indices.tolist()]
        words = pad_sequence(sentences, batch_first=True)
        mask = words > 0
        targets = words.roll(1, dims=1).where(mask, IGNORED)
        targets[:, 0] = IGNORED
        return {"input_ids": words, "attention_mask": mask}, targets


def build(count: int = 200) -> Data:
    """The function that `data._target_` names."""
    train = Sentences(count, seed=0)
    return Data(
        train=train,
        test=Sentences(count // 4, seed=1),
        classes=WORDS,
        shape=(16,),
        longest=train.longest,
    )


class Embedding(nn.Module):
    """The first layer gets the dict, and passes a tuple on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)

    def forward(self, input: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.words(input["input_ids"]), input["attention_mask"]


class Block(nn.Module):
    """Mixes each word with the one before it; words of padding stay zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(2 * width, width)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value, mask = given
        normed = self.norm(value)
        both = torch.cat([normed, normed.roll(1, dims=1)], dim=-1)
        return (value + self.mix(both).tanh()) * mask.unsqueeze(-1), mask


class Head(nn.Module):
    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.scores = nn.Linear(width, num_classes)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        value, _ = given
        return self.scores(self.dropout(value))


def tagger(num_classes: int, width: int = 16, depth: int = 4) -> nn.Sequential:
    """The function that `model._target_` names."""
    return nn.Sequential(Embedding(width), *(Block(width) for _ in range(depth)), Head(width, num_classes))
