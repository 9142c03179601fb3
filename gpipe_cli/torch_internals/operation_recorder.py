"""Records every kernel that torch would launch, with its floating-point operations and the bytes it moves.

torch keeps dispatch modes, which see every operation, private.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, supported_activities
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gpipe_cli.torch_internals.tensors import storage_of, tensors_in_tree

Shape = tuple[int, ...]
NO_KERNEL = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "detach",
        "_unsafe_view",
        "alias",
    }
)
"""Operations that only make a tensor; views, which torch marks as such, launch nothing either."""
PICKS = frozenset({"embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss2d_forward"})
"""Operations that read no more of their arguments than they return."""
PUTS = frozenset({"index_put_", "index_add_", "scatter_", "scatter_add_"})
"""Operations that read and write no more of their first argument than the others have."""
COPIES = frozenset({"_to_copy", "clone", "copy_", "bitsandbytes::dequantize_4bit"})
TENSOR_CORE_SIZE = 8
"""NVIDIA's guide to matrix multiplication: sizes in multiples of 16 bytes, which are 8 numbers of 16 bits."""


@final
class KernelCost(NamedTuple):
    """One kernel, for one micro-batch."""

    name: str
    flops: int
    """FLOPs of matrix products, convolutions and attention; all other times depend on bytes."""
    activation_bytes: int
    """Read and written, in proportion to the rows of the micro-batch."""
    weight_bytes: int
    """Read and written whatever the rows: parameters and their gradients."""
    half: bool
    """Whether it computes with 16-bit numbers."""
    aligned: bool
    """Whether the sizes of a matrix product suit tensor cores."""
    weight_grad: float = 0.0
    """Which share of it computes gradients of parameters."""

    @property
    def is_attention(self) -> bool:
        return "attention" in self.name


@final
class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every operation of this thread is recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas: dict[Any, Callable[..., int]] = FlopCounterMode(
            display=False,
            custom_mapping={
                **ATTENTION_ON_CPU,
                torch.ops.aten.convolution_backward: _convolution_backward,
                torch.ops.aten._grouped_mm: _grouped_mm,
            },
        ).flop_registry
        self._kernels: list[_Kernel] = []
        self._alive: list[_Kernel] = []
        self._weights: set[int] = set()
        self._mask: _Kernel | None = None

    def clear(self) -> None:
        """Forget what was recorded, and the weights of the layer before."""
        self._kernels, self._alive, self._weights = [], [], set()

    def take(self, parameters: Sequence[Tensor]) -> tuple[KernelCost, ...]:
        """What was recorded since the last call, by a layer with these parameters, which may have gradients now."""
        owned = [*parameters, *(each.grad for each in parameters if each.grad is not None)]
        self._weights |= {storage_of(tensor) for tensor in owned}
        for kernel in self._kernels:
            if kernel.name in COPIES and kernel.inputs_of(self._weights):
                self._weights |= kernel.storages  # autocast computes with copies of the parameters
        for kernel in reversed(self._kernels):
            added = kernel.name == "add_" and storage_of(kernel.inputs[0]) in self._weights
            if added or (kernel.name in COPIES and kernel.outputs_of(self._weights)):
                self._weights |= kernel.storages  # what is added to a gradient is one too
        operations = tuple(kernel.operation(self._weights) for kernel in self._kernels)
        # Kept until the next layer: backward uses copies that forward made.
        self._alive += self._kernels
        self._kernels = []
        return operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if (func.namespace == "aten" or name in COPIES) and not func.is_view and name not in NO_KERNEL:
            formula = self._formulas.get(func.overloadpacket)
            flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=output))
            kernel = _Kernel(name, flops, tensors_in_tree((args, kwargs)), tensors_in_tree(output))
            if not self._makes_mask(kernel):
                self._kernels.append(kernel)
        return output

    def _makes_mask(self, kernel: _Kernel) -> bool:
        """An accelerator draws, scales and applies the mask of a dropout at once; a CPU has three operations for it."""
        if kernel.name == "bernoulli_":
            self._mask = kernel
            return True
        return kernel.name == "div_" and self._mask is not None and kernel.inputs[0] is self._mask.inputs[0]


@final
@dataclass(frozen=True)
class _Kernel:
    """Holds its tensors, so that no other tensor gets their memory before all are judged."""

    name: str
    flops: int
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    def operation(self, weights: Collection[int]) -> KernelCost:
        moved = self._moved()
        weight_bytes = sum(_bytes(tensor) for tensor in moved if storage_of(tensor) in weights)
        floating = [tensor for tensor in (*self.outputs, *self.inputs) if tensor.is_floating_point()]
        return KernelCost(
            self.name,
            self.flops,
            sum(map(_bytes, moved)) - weight_bytes,
            weight_bytes,
            half=bool(floating) and floating[0].itemsize == 2,
            aligned=self._aligned(weights),
            weight_grad=self._weight_grad(weights),
        )

    def _moved(self) -> list[Tensor]:
        """The tensors that it reads and writes."""
        if self.name in PUTS:
            return [*self.inputs[1:], *self.inputs[1:]]
        return [*(self.outputs if self.name in PICKS else self.inputs), *self.outputs]

    def _aligned(self, weights: Collection[int]) -> bool:
        matrices = [
            tensor
            for tensor in (*self.outputs, *self.inputs)
            if tensor.is_floating_point() and tensor.dim() in (2, 3)
        ]
        # Of a product with weights their sizes decide: the other one is the number of rows, which may change.
        own = [tensor for tensor in matrices if storage_of(tensor) in weights]
        return all(size % TENSOR_CORE_SIZE == 0 for tensor in own or matrices for size in tensor.shape[-2:])

    @property
    def storages(self) -> set[int]:
        return {storage_of(tensor) for tensor in (*self.inputs, *self.outputs)}

    def inputs_of(self, storages: Collection[int]) -> bool:
        return any(storage_of(tensor) in storages for tensor in self.inputs)

    def outputs_of(self, storages: Collection[int]) -> bool:
        return any(storage_of(tensor) in storages for tensor in self.outputs)

    def _weight_grad(self, weights: Collection[int]) -> float:
        written = [storage_of(tensor) in weights for tensor in self.outputs]
        # A convolution computes the gradients of its input and of its weights at once.
        return 1.0 if written and all(written) else 0.5 if any(written) else 0.0


def _bytes(tensor: Tensor) -> int:
    # An expanded tensor has more elements than memory.
    return int(min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()))


def _convolution_backward(
    gradient: Shape,
    input: Shape,
    weight: Shape,
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
    wanted: Sequence[bool],
    **options: Any,
) -> int:
    """As much as the forward for each of the gradients of input and weight; torch's formula forgets the groups."""
    places = (input if transposed else gradient)[2:]
    return 2 * gradient[0] * prod(places) * prod(weight) * sum(wanted[:2])


def _grouped_mm(left: Shape, right: Shape, *rest: object, **options: object) -> int:
    """Each row of a group with the matrix of the group; torch counts none of it."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _attention(query: Shape, key: Shape, value: Shape, *rest: object, **options: object) -> int:
    """The scores, then their product with the values: two matrix multiplications."""
    return _pair(query, key) * (query[-1] + value[-1])


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *rest: object, **options: object
) -> int:
    """The scores again, then the gradients of scores, values, queries and keys."""
    return _pair(query, key) * (3 * query[-1] + 2 * value[-1])


def _pair(query: Shape, key: Shape) -> int:
    """A multiplication and an addition for each pair of query and key, per element of a row."""
    batch, heads, queries, _ = query
    return 2 * batch * heads * queries * key[-2]


ATTENTION_ON_CPU: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""For `FlopCounterMode(custom_mapping=...)`, which counts only the kernels of CUDA. Those of the CPU are private."""


def profiler_of_all_threads() -> profile:
    """torch's profiler, which by itself does not see the operators of threads that began before it."""
    return profile(
        activities=supported_activities(),  # type: ignore[no-untyped-call]
        record_shapes=True,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
