from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpipe_cli.tensor_files.tensor_file import DTYPES, BadTensors, decode, encode, unsupported_reason


def file_of(tensors: dict[str, Tensor]) -> bytearray:
    return bytearray(b"".join(encode(tensors)))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def of_every_kind() -> dict[str, Tensor]:
    tensors = {name: (torch.randn(3, 5) * 9).to(dtype) for name, dtype in DTYPES.items()}
    return {
        **tensors,
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(3, 4).t(),
        "ümlaut.weight": torch.arange(3),
    }


def test_every_kind_of_tensor_comes_back_to_the_bit() -> None:
    tensors = of_every_kind()
    decoded = decode(file_of(tensors))
    assert decoded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert decoded[name].dtype == tensor.dtype and decoded[name].shape == tensor.shape
        assert torch.equal(bits(decoded[name]), bits(tensor))


def test_anybodys_reader_reads_what_is_written() -> None:
    tensors = of_every_kind()
    loaded = safetensors.torch.load(bytes(file_of(tensors)))
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name].float(), tensor.float()) for name, tensor in tensors.items())


def test_what_anybody_writes_is_read() -> None:
    """safetensors puts wide elements first too, but a file may have them anywhere."""
    tensors = {name: tensor.contiguous() for name, tensor in of_every_kind().items()}
    decoded = decode(bytearray(safetensors.torch.save(tensors, metadata={"format": "pt"})))
    assert all(torch.equal(decoded[name].float(), tensor.float()) for name, tensor in tensors.items())
    byte = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    number = {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}
    header = json.dumps({"a": byte, "b": number}).encode()
    unaligned = decode(bytearray(struct.pack("<Q", len(header)) + header + b"\7" + struct.pack("<f", 2.5)))
    assert unaligned["b"].item() == 2.5


def test_equal_tensors_give_equal_bytes_whatever_their_order_or_layout() -> None:
    first = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
    second = {"b": torch.ones(2), "a": torch.arange(6.0).reshape(2, 3).t().contiguous().t()}
    assert file_of(first) == file_of(second)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "is a int"),
        (torch.ones(2, dtype=torch.complex128), "has the dtype torch.complex128"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2), None),
    ],
)
def test_what_cannot_be_written_says_why(value: Any, says: str | None) -> None:
    reason = unsupported_reason(value)
    assert reason is None if says is None else says in str(reason)


HOSTILE = [
    "[]",
    '{"a":1}',
    '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}',
    '{"a":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}',
    '{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    '{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
    '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4000000]}}',
    "[" * 100_000,
    '{"a":',
]


@pytest.mark.parametrize("header", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_header_is_refused_before_anything_is_made_of_it(header: str) -> None:
    with pytest.raises(BadTensors):
        decode(bytearray(struct.pack("<Q", len(header)) + header.encode() + bytes(4)))


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 2**63), struct.pack("<Q", 9) + b"{}"])
def test_a_length_that_leads_out_of_the_file_is_refused(content: bytes) -> None:
    with pytest.raises(BadTensors):
        decode(bytearray(content))


@given(st.data())
def test_no_change_to_a_header_leads_to_more_than_a_refusal(data: st.DataObject) -> None:
    content = file_of({"a": torch.ones(3), "b": torch.ones(2, 2)})
    (length,) = struct.unpack_from("<Q", content)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 8 + length - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(content)
    except BadTensors:
        return
    assert sum(tensor.nbytes for tensor in decoded.values()) <= len(content)
    assert json.dumps(list(decoded))
