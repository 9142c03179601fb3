from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.offload.stored_tensors import Layout, as_bytes
from gpipe_cli.torch_internals.tensors import ALIGNMENT

shapes = st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=6)


@given(shapes, st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]))
def test_every_tensor_has_an_aligned_place_of_its_own(sides: list[list[int]], dtype: torch.dtype) -> None:
    tensors = [torch.randn(side).to(dtype) for side in sides]
    layout = Layout(tensors)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        assert slot.begin % ALIGNMENT == 0
        slot.view(memory).copy_(tensor)
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        assert torch.equal(slot.view(memory), tensor)
        assert slot.view(memory).stride() == tensor.stride()
        placeholder = slot.placeholder(tensor.device)
        assert placeholder.shape == tensor.shape and placeholder.dtype == dtype


def test_channels_last_stays_so_and_holes_do_not() -> None:
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    holes = torch.randn(4, 6)[:, ::2]
    layout = Layout([last, holes])
    assert [slot.stride for slot in layout.slots] == [last.stride(), (3, 1)]
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.slots[0].view(memory).copy_(last)
    assert torch.equal(memory[: last.nbytes], as_bytes(last))
