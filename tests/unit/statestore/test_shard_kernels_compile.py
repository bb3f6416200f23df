# SPDX-License-Identifier: Apache-2.0
"""The kernels of copies compile for Hopper, on any machine: the interpreter runs what the compiler refuses, such as a
name that is a parameter and then another type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from statestore.connector.cache_view import CacheView
from statestore.reshard import head_bytes, row_bytes
from tests.property.rank_caches import RankCaches, blocks_for
from tests.property.reshard_cases import geometry
from tests.unit.statestore.test_shard_kernels import LAYOUTS, LENGTH, SMALL

pytest.importorskip("triton.backends.nvidia")

POINTERS = {torch.int64: "*i64", torch.int32: "*i32"}


def compiled(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What Triton makes of a launch for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    signature = {
        name: POINTERS[one.dtype]
        if isinstance(one, torch.Tensor)
        else "i32"
        if -(1 << 31) <= one < 1 << 31
        else "i64"
        for name, one in zip(kernel.arg_names, arguments, strict=False)
    } | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": options["num_warps"]}
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_launch_compiles(layout: dict[str, Any]) -> None:
    from statestore.gpu.kernels import rows_kernel, states_kernel
    from statestore.gpu.launch import CHECK, GATHER, SCATTER, ShardKernels

    if not hasattr(states_kernel, "device_caches"):
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled in this process")
    g = geometry(tp=4, **{**SMALL, **layout})
    caches = RankCaches(g, blocks_for(g, LENGTH))
    view = CacheView(caches.caches, caches.config, g)
    kernels = ShardKernels(g, view._kda, view._mla)
    pages = torch.from_numpy(kernels._pages)
    heads = torch.empty(head_bytes(g) // 8, dtype=torch.int64)
    rows = torch.empty(row_bytes(g) // 8, dtype=torch.int64)
    tables = torch.zeros(4, 1, dtype=torch.int32)
    found = torch.zeros(2 + len(g.kda_layers), dtype=torch.int64)
    for mode in (GATHER, SCATTER, CHECK):
        _, arguments, options = kernels._states_call(mode, pages, 0, heads, found)
        assert "cubin" in compiled(states_kernel, arguments, options).asm
        _, arguments, options = kernels._rows_call(mode, tables, rows, found)
        assert "cubin" in compiled(rows_kernel, arguments, options).asm
