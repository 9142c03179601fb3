from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from gpipe_cli.distributed.stage import BoundaryLayouts
from gpipe_cli.torch_internals.tensors import ALIGNMENT

BASE = torch.arange(240.0).view(2, 5, 4, 6)
VIEWS = {
    "contiguous": BASE,
    "transposed": BASE.transpose(1, 3),
    "channels_last": BASE.contiguous(memory_format=torch.channels_last),
    "channels_last of one pixel": BASE[:, :, :1, :1].contiguous(memory_format=torch.channels_last),
    "with gaps": BASE[:, ::2, 1:, 2:4],
    "not aligned": BASE[1:, 2:],
    "expanded": BASE[:, :1].expand(-1, 3, -1, -1),
    "expanded, with gaps, not aligned": BASE[:, 1:2, ::2, 1:].expand(-1, 3, -1, -1),
    "one number": BASE[0, 0, 0, 1],
    "one number, expanded": BASE[0, 0, 0, 1].expand(3, 4),
    "overlapping": torch.arange(9.0).unfold(0, 4, 2),
    "without elements": BASE[:, :0, 1:],
    "of flags": (BASE > 7).transpose(0, 2),
}


def crossed(sender: BoundaryLayouts, receiver: BoundaryLayouts, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """What is sent, and what the receiver makes of a copy of it."""
    (sent,) = sender.pack("place", [tensor])
    (arrived,) = receiver.unpack("place", [sent.clone()])
    return sent, arrived


@pytest.mark.parametrize("name", VIEWS)
def test_a_tensor_arrives_as_it_lay(name: str) -> None:
    tensor, store = VIEWS[name], HashStore()
    sender, receiver = BoundaryLayouts(store), BoundaryLayouts(store)
    for _ in range(2):
        sent, arrived = crossed(sender, receiver, tensor)
        assert sent.is_contiguous() and sent.shape == tensor.shape
        assert torch.equal(arrived, tensor) and arrived.stride() == tensor.stride()
        assert arrived.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT
        assert arrived._base is None, "a layer may write it in place"
    assert not store.num_keys(), "nothing is said a second time, and nothing is left"


@pytest.mark.parametrize("name", ["transposed", "channels_last"])
def test_a_tensor_without_gaps_is_sent_without_a_copy(name: str) -> None:
    (sent,) = BoundaryLayouts(HashStore()).pack("place", [VIEWS[name]])
    assert sent.data_ptr() == VIEWS[name].data_ptr()


@pytest.mark.parametrize(
    ("first", "second"), [(BASE, BASE.mT.contiguous().mT), (BASE.mT.contiguous().mT, BASE)]
)
def test_a_tensor_that_lies_otherwise_than_the_first_arrives_as_the_first_did(
    first: Tensor, second: Tensor
) -> None:
    store = HashStore()
    sender, receiver = BoundaryLayouts(store), BoundaryLayouts(store)
    crossed(sender, receiver, first)
    _, arrived = crossed(sender, receiver, second)
    assert torch.equal(arrived, second) and arrived.stride() == first.stride()


def test_a_gradient_that_was_none_at_first_arrives_contiguous() -> None:
    store = HashStore()
    sender, receiver = BoundaryLayouts(store), BoundaryLayouts(store)
    assert sender.pack("place", [None]) == receiver.unpack("place", [None]) == (None,)
    assert crossed(sender, receiver, BASE.mT)[1].is_contiguous()
