"""Next-byte prediction on any text file; by default Shakespeare's sonnets (see files/sonnets.md).

A sample is a window of `context` bytes, and its target is the same window one byte later. The end of the file is held
out. A byte is a token, so there is no tokenizer, and any encoding and language works.
"""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, check_common_keys
from gpipe_cli.data.tokenizer import ByteTokenizer
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.safe_files import read_regular
from gpipe_cli.values import check_whole_number

_FILE = Path(__file__).parent / "files" / "sonnets.txt"
_MAX_BYTES = 2**30
"""Limit on the size of a file: shuffling its windows takes several bytes of memory for each."""


def build(
    path: str | None = None,
    context: int = 32,
    stride: int = 8,
    held_out: float = 0.1,
    workers: int = 0,
    timeout: float | None = None,
) -> Data:
    """Make a window of `context` bytes every `stride` bytes; hold out the last `held_out` share of the file.

    Held-out windows do not overlap, so that the model predicts each of those bytes once.
    """
    check_common_keys(None, workers, timeout)
    check_whole_number("data.context", context, least=1)
    check_whole_number("data.stride", stride, least=1)
    if not 0 < held_out < 1:
        raise ConfigError(f"data.held_out={held_out}: must be between 0 and 1")
    text = _read(_FILE if path is None else Path(path))
    held_out_bytes = max(round(len(text) * held_out), context + 1)
    if len(text) - held_out_bytes <= context:
        raise DataError(
            f"data.path={path}: {len(text)} bytes are too few to train on and to hold out windows of {context}; "
            "give a longer text or a smaller data.context"
        )
    train = TextSamples(text[:-held_out_bytes], context, stride)
    test = TextSamples(text[-held_out_bytes:], context, context)
    tokenizer = ByteTokenizer()
    return Data(
        train,
        test,
        classes=tokenizer.vocabulary,
        shape=(context,),
        workers=workers,
        timeout=timeout,
        tokenizer=tokenizer,
    )


def _read(path: Path) -> Tensor:
    try:
        content = bytearray(read_regular(path, _MAX_BYTES))
    except OSError as error:
        raise DataError(f"data.path={path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # the name contains a null byte
        raise DataError(f"data.path={path}: cannot be read: {error}") from error
    if not content:
        raise DataError(f"data.path={path}: is empty")
    return torch.frombuffer(content, dtype=torch.uint8)


@final
class TextSamples:
    """text: uint8 [length]. Windows are views of it; batches are copies as int64."""

    def __init__(self, text: Tensor, context: int, stride: int) -> None:
        self._windows = text.unfold(0, context + 1, stride)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return inputs[0], targets[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        windows = self._windows.index_select(0, indices).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
