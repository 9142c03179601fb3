from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.errors import ResourceError
from gpipe_cli.offload.tiers import CpuTier, DiskTier, Layout, Tier, as_bytes
from gpipe_cli.torch_internals.tensors import ALIGNMENT

CPU = torch.device("cpu")


@pytest.fixture(params=["cpu", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return CpuTier([CPU]) if request.param == "cpu" else DiskTier(tmp_path)


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_what_was_written_is_read(tier: Tier) -> None:
    regions = [tier.region(size) for size in (100, 0, 3000)]
    contents = [numbers(100, 0), numbers(0, 1), numbers(3000, 2)]
    for region, content in zip(regions, contents, strict=True):
        region.write(0, content)
    regions[2].write(64, numbers(10, 3))
    contents[2][64:74] = numbers(10, 3)
    for region, content in zip(regions, contents, strict=True):
        buffer = torch.empty_like(content)
        region.read(0, buffer)
        assert torch.equal(buffer, content)
    part = torch.empty(50, dtype=torch.uint8)
    regions[2].read(60, part)
    assert torch.equal(part, contents[2][60:110])
    tier.close()
    tier.close()


def test_the_file_has_no_name(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "not" / "there" / "yet")
    tier.reserve(10_000)
    assert list(tmp_path.iterdir()) == []
    tier.close()


def test_a_file_system_without_tmpfile_gets_a_file_that_is_unlinked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def without(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", without)
    tier = DiskTier(tmp_path)
    region = tier.region(100)
    region.write(0, numbers(100, 1))
    assert list(tmp_path.iterdir()) == []
    tier.close()


def test_a_full_disk_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, begin: int, count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tier = DiskTier(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ResourceError, match=r"No space left on device; 5,000 bytes are needed, [\d,]+ are free"
    ):
        tier.reserve(5000)
    tier.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(ResourceError, match="cannot be stored there: Permission denied"):
        DiskTier(tmp_path)


def test_partial_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda file, views, at: read(file, [views[0][:7]], at))
    monkeypatch.setattr(os, "pwritev", lambda file, views, at: write(file, [views[0][:5]], at))
    region = DiskTier(tmp_path).region(100)
    region.write(0, numbers(100, 4))
    buffer = torch.empty(100, dtype=torch.uint8)
    region.read(0, buffer)
    assert torch.equal(buffer, numbers(100, 4))


def test_regions_that_threads_make_at_once_do_not_overlap(tmp_path: Path) -> None:
    """Two workers once got the same bytes of the file, or bytes beyond its end."""
    tier = DiskTier(tmp_path)
    try:
        with ThreadPoolExecutor(8) as threads:
            regions = list(threads.map(lambda _: tier.region(64), range(2000)))
        for number, region in enumerate(regions):
            region.write(0, torch.full((64,), number % 251, dtype=torch.uint8))
        for number, region in enumerate(regions):
            region.read(0, read := torch.empty(64, dtype=torch.uint8))
            assert (read == number % 251).all()
    finally:
        tier.close()


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
