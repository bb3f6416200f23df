# SPDX-License-Identifier: Apache-2.0
"""Runs the Gluon kernels without a GPU: their Python text with torch in the place of the language, a program at a time.

What is checked is what a program computes and which addresses it reads and writes. Layouts, races between warps and
the hardware's rounding are not: those need a GPU. Shared memory begins as NaN, an asynchronous copy arrives when it is
waited for, and a store that writes an address twice fails.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHIFT = 40
"""An address is (tensor << SHIFT) + element."""


class Memory:
    """The tensors that a launch was given."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pointer(self, tensor: Tensor) -> Pointer:
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        self.tensors.append(flat)
        return Pointer(
            self, torch.tensor((len(self.tensors) << SHIFT) + tensor.storage_offset()), tensor.dtype
        )

    def _groups(self, address: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        for which in (address >> SHIFT).unique().tolist():
            at = ((address >> SHIFT) == which).nonzero().squeeze(1)
            found.append((self.tensors[which - 1], at, address[at] & ((1 << SHIFT) - 1)))
        return found

    def load(self, address: Tensor, mask: Tensor, other: float, dtype: torch.dtype) -> Tensor:
        out = torch.full(address.shape, other, dtype=dtype).flatten()
        live = mask.flatten().nonzero().squeeze(1)
        for tensor, at, element in self._groups(address.flatten()[live]):
            assert int(element.max()) < tensor.numel(), "an address outside of its tensor"
            out[live[at]] = tensor[element]
        return out.view(address.shape)

    def store(self, address: Tensor, value: Tensor, mask: Tensor) -> None:
        live = mask.flatten().nonzero().squeeze(1)
        where = address.flatten()[live]
        assert where.unique().numel() == where.numel(), "a store writes an address twice"
        for tensor, at, element in self._groups(where):
            tensor[element] = value.flatten()[live[at]].to(tensor.dtype)


class Pointer:
    """Addresses of elements of one type."""

    def __init__(self, memory: Memory, address: Tensor, element: torch.dtype) -> None:
        self.memory, self.address = memory, address
        self.dtype = types.SimpleNamespace(element_ty=element)

    def __add__(self, offset: Tensor | int) -> Pointer:
        # In 64 bits: torch lets a scalar's width yield to a tensor's.
        return Pointer(self.memory, self.address + torch.as_tensor(offset).long(), self.dtype.element_ty)


class Shared:
    """A part of shared memory."""

    def __init__(self, view: Tensor) -> None:
        self.view = view

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.view.narrow(dim, start, length))

    def index(self, at: int) -> Shared:
        return Shared(self.view[at])

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.view.permute(order))

    def load(self, _: object) -> Tensor:
        return self.view.clone()

    def store(self, value: Tensor) -> None:
        assert value.shape == self.view.shape
        self.view.copy_(value)


def _truncated(x: Tensor) -> Tensor:
    """What a tensor core sees of fp32: the 11 leading bits."""
    return (x.contiguous().view(torch.int32) & -0x2000).view(torch.float32)


def _product(a: Tensor, b: Tensor, acc: Tensor, input_precision: str) -> Tensor:
    assert input_precision == "tf32"
    return acc + _truncated(a) @ _truncated(b)


def _head(x: Tensor) -> Tensor:
    return _truncated((x.contiguous().view(torch.int32) + 0x1000).view(torch.float32))


def _tensor(x: Tensor | float) -> Tensor:
    return torch.as_tensor(x)


class Language:
    """The part of ``gluon.language`` that the kernels use."""

    float32, int32, int64 = torch.float32, torch.int32, torch.int64
    constexpr = staticmethod(lambda value: value)
    static_range = range
    NVMMADistributedLayout = BlockedLayout = SliceLayout = staticmethod(lambda *_: None)
    DotOperandLayout = SwizzledSharedLayout = staticmethod(lambda *_: None)
    exp, log, rsqrt = torch.exp, torch.log, torch.rsqrt
    join = staticmethod(lambda a, b: torch.stack([a, b], -1))
    expand_dims = staticmethod(torch.unsqueeze)
    sum = staticmethod(torch.sum)

    def __init__(self) -> None:
        self.program = 0
        self.copies: list[tuple[Shared, Tensor, Tensor]] = []

    def program_id(self, axis: int) -> Tensor:
        assert axis == 0
        return torch.tensor(self.program)

    def arange(self, begin: int, end: int, layout: object = None) -> Tensor:
        assert (end - begin).bit_count() == 1, "shapes are powers of two"
        return torch.arange(begin, end, dtype=torch.int32)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: object = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def convert_layout(self, x: Tensor, layout: object, assert_trivial: bool = False) -> Tensor:
        return x

    def gather(self, source: Tensor, index: Tensor, axis: int) -> Tensor:
        return source.gather(axis, index.long())

    def reduce(self, values: tuple[Tensor, ...], axis: int, combine: object) -> tuple[Tensor, ...]:
        return tuple(value.sum(axis) for value in values)

    def maximum(self, a: Tensor | float, b: Tensor | float) -> Tensor:
        return torch.maximum(_tensor(a), _tensor(b))

    def minimum(self, a: Tensor | float, b: Tensor | float) -> Tensor:
        return torch.minimum(_tensor(a), _tensor(b))

    def where(self, condition: Tensor, a: Any, b: Any) -> Any:
        if isinstance(a, Pointer):
            return Pointer(a.memory, torch.where(condition, a.address, b.address), a.dtype.element_ty)
        return torch.where(condition, a, b)

    def load(self, at: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
        live = torch.ones((), dtype=torch.bool) if mask is None else mask
        address, live = torch.broadcast_tensors(at.address, live)
        return at.memory.load(address, live, other, at.dtype.element_ty)

    def store(
        self, at: Pointer, value: Tensor, mask: Tensor | None = None, eviction_policy: str = ""
    ) -> None:
        live = torch.ones((), dtype=torch.bool) if mask is None else mask
        address, value, live = torch.broadcast_tensors(at.address, value, live)
        at.memory.store(address, value, live)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def thread_barrier(self) -> None:
        """Programs run one instruction after the other here."""

    # The module ``async_copy``.

    def copy_to_shared(self, buffer: Shared, at: Pointer, mask: Tensor | None = None) -> None:
        live = torch.ones((), dtype=torch.bool) if mask is None else mask
        address, live = torch.broadcast_tensors(at.address, live)
        assert address.shape == buffer.view.shape
        self.copies.append((buffer, at.memory.load(address, live, 0.0, at.dtype.element_ty), live))

    def commit_group(self) -> None:
        """``wait_group(0)`` waits for all groups."""

    def wait_group(self, left: int) -> None:
        assert left == 0
        for buffer, values, live in self.copies:
            buffer.view[live] = values[live]
        self.copies.clear()


class Emulated:
    """Stands where ``gluon_kernels.advance_window`` stands."""

    def __init__(self) -> None:
        from decode_worker.replay_ssm import gluon_kernels, gluon_prepare

        self.language = Language()
        self.launches: list[dict[str, Any]] = []
        shared: dict[str, Any] = {
            "gl": self.language,
            "async_copy": self.language,
            "thread_barrier": self.language.thread_barrier,
            "copy_to_shared": self.language.copy_to_shared,
            "mma_v2": _product,
            "LOG2_E": 1.4426950408889634,
            "_head": _head,
            "_exp2": torch.exp2,
            "_reciprocal": torch.reciprocal,
            "wait_for_previous_kernel": lambda: None,
            "let_next_kernel_start": lambda: None,
        }
        self._modules: list[dict[str, Any]] = []
        for module in (gluon_prepare, gluon_kernels):
            own = dict(vars(module)) | shared
            for name, found in vars(module).items():
                raw = getattr(found, "fn", None)
                if isinstance(raw, types.FunctionType) and name not in shared:
                    shared[name] = types.FunctionType(raw.__code__, own, name)
            own.update(shared)
            self._modules.append(own)
        self._kernel = shared["advance_window"]
        self._names = gluon_kernels.advance_window.arg_names

    def damage(self, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """For controls: put ``change(f)`` in the place of the function of this name."""
        right = next(own[name] for own in self._modules if name in own)
        for own in self._modules:
            own[name] = change(right)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.launches.append(options)
            memory = Memory()
            given = [memory.pointer(a) if isinstance(a, Tensor) else a for a in args]
            constants = {k: v for k, v in options.items() if k in self._names}
            for self.language.program in range(grid[0]):
                self._kernel(*given, **constants)
                assert not self.language.copies, "a copy that nobody waited for"

        return launch
