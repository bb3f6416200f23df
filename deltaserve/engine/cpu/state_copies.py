# SPDX-License-Identifier: Apache-2.0
"""The state copies behind prefix caching with speculation, which vLLM has as Triton kernels only.

With aligned recurrent blocks a request's state lives in one block column at a time. Before a step it moves on to the
column that the step writes (``precopy``); after a step whose accepted tokens crossed a block boundary, the state at the
boundary is put where the prefix cache expects it (``postprocess``). In both, the bias is how many accepted tokens lie
between: the recurrent state of each is in a column of its own, the convolution's raw columns are shifted.

Where the engine folds at start (``replay.py``), the state of the running column lacks the pending records: both fold
them on the way instead.

vLLM hands the caches over as addresses; a block table entry is an int32, a page may be longer than its state.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deltaserve.engine.cpu import replay


@dataclass(frozen=True)
class _Pages:
    """Every (layer, state) page array: addresses, strides and sizes in bytes unless said otherwise."""

    tables: list[int]
    table_stride: int
    """Entries between two requests' rows."""
    bases: list[int]
    block_strides: list[int]
    element_sizes: list[int]
    inner_sizes: list[int]
    """Elements of a recurrent state, or of one token's convolution column."""
    conv_widths: list[int]
    """Columns of a convolution state; 0 marks a recurrent state."""
    groups: list[int]
    row_counts: list[int]
    row_strides: list[int]
    columns_last: bool
    """Whether a convolution page is [C, columns] and not [columns, C]."""

    def copy(self, request: int, source: int, target: int, bias: int) -> None:
        """Move every state of ``request`` from block column ``source`` to ``target``, ``bias`` tokens on."""
        for i, base in enumerate(self.bases):
            row = self.tables[self.groups[i]] + 4 * request * self.table_stride
            to = base + _int32(row, target) * self.block_strides[i]
            if self.conv_widths[i] == 0:
                block = base + _int32(row, source + bias) * self.block_strides[i]
                ctypes.memmove(to, block, self.inner_sizes[i] * self.element_sizes[i])
                continue
            block = base + _int32(row, source) * self.block_strides[i]
            kept = self.conv_widths[i] - bias
            if not self.columns_last:
                column = self.inner_sizes[i] * self.element_sizes[i]
                ctypes.memmove(to, block + bias * column, kept * column)
                continue
            for r in range(self.row_counts[i]):
                offset, shift = r * self.row_strides[i], bias * self.element_sizes[i]
                ctypes.memmove(to + offset, block + offset + shift, kept * self.element_sizes[i])


def _int32(row: int, column: int) -> int:
    return ctypes.c_int32.from_address(row + 4 * column).value


def _requests(num_reqs: int, idx_mapping: Tensor | None, mapped: bool) -> list[int]:
    if not mapped or idx_mapping is None:
        return list(range(num_reqs))
    return [i for i in idx_mapping[:num_reqs].tolist() if i >= 0]


def precopy(
    mamba_state_idx_ptr: Tensor,
    src_col_ptr: Tensor,
    token_bias_ptr: Tensor,
    block_table_ptrs_ptr: Tensor,
    block_table_stride_req: int,
    state_base_addrs_ptr: Tensor,
    state_block_strides_ptr: Tensor,
    state_elem_sizes_ptr: Tensor,
    state_inner_sizes_ptr: Tensor,
    state_conv_widths_ptr: Tensor,
    state_group_indices_ptr: Tensor,
    state_dim_row_count_ptr: Tensor,
    state_dim_row_stride_ptr: Tensor,
    idx_mapping_ptr: Tensor | None,
    num_reqs: int,
    COPY_BLOCK_SIZE: int,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = True,
    TEMPORAL_TILES: int = 1,
) -> None:
    """Bring each request's state from the column of the last step to the column of this one; vLLM's signature."""
    pages = _Pages(
        block_table_ptrs_ptr.tolist(),
        int(block_table_stride_req),
        state_base_addrs_ptr.tolist(),
        state_block_strides_ptr.tolist(),
        state_elem_sizes_ptr.tolist(),
        state_inner_sizes_ptr.tolist(),
        state_conv_widths_ptr.tolist(),
        state_group_indices_ptr.tolist(),
        state_dim_row_count_ptr.tolist(),
        state_dim_row_stride_ptr.tolist(),
        CONV_STATE_DIM_FIRST,
    )
    moves = []
    for request in _requests(num_reqs, idx_mapping_ptr, HAS_IDX_MAPPING):
        source, target = int(src_col_ptr[request]), int(mamba_state_idx_ptr[request])
        if source >= 0 and source != target:
            moves.append((request, source, target))
    if (steps := replay.active()) is not None:
        steps.move(moves)
        return
    for request, source, target in moves:
        pages.copy(request, source, target, int(token_bias_ptr[request]))


def postprocess(
    num_accepted_tokens_ptr: Tensor,
    mamba_state_idx_ptr: Tensor,
    num_scheduled_tokens_ptr: Tensor | None,
    num_computed_tokens_ptr: Tensor,
    num_draft_tokens_ptr: Tensor | None,
    block_table_ptrs_ptr: Tensor,
    block_table_stride_req: int,
    state_base_addrs_ptr: Tensor,
    state_block_strides_ptr: Tensor,
    state_elem_sizes_ptr: Tensor,
    state_inner_sizes_ptr: Tensor,
    state_conv_widths_ptr: Tensor,
    state_group_indices_ptr: Tensor,
    state_dim_row_count_ptr: Tensor,
    state_dim_row_stride_ptr: Tensor,
    num_accepted_tokens_out_ptr: Tensor,
    idx_mapping_ptr: Tensor | None,
    num_reqs: int,
    block_size: int,
    COPY_BLOCK_SIZE: int,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = False,
    PRECOMPUTED_NEW_COMPUTED: bool = False,
    TEMPORAL_TILES: int = 1,
) -> None:
    """Store the state at the last block boundary that the accepted tokens crossed; vLLM's signature.

    Where the boundary's column is the running one, the accepted count becomes one: the state there is now the state
    after the boundary, not after the first token of the window.
    """
    pages = _Pages(
        block_table_ptrs_ptr.tolist(),
        int(block_table_stride_req),
        state_base_addrs_ptr.tolist(),
        state_block_strides_ptr.tolist(),
        state_elem_sizes_ptr.tolist(),
        state_inner_sizes_ptr.tolist(),
        state_conv_widths_ptr.tolist(),
        state_group_indices_ptr.tolist(),
        state_dim_row_count_ptr.tolist(),
        state_dim_row_stride_ptr.tolist(),
        CONV_STATE_DIM_FIRST,
    )
    steps, cuts = replay.active(), []
    for request in _requests(num_reqs, idx_mapping_ptr, HAS_IDX_MAPPING):
        accepted, column = int(num_accepted_tokens_ptr[request]), int(mamba_state_idx_ptr[request])
        computed = int(num_computed_tokens_ptr[request])
        if PRECOMPUTED_NEW_COMPUTED:
            running = computed - accepted + 1
        else:
            running = (
                computed + _entry(num_scheduled_tokens_ptr, request) - _entry(num_draft_tokens_ptr, request)
            )
            computed = running + accepted - 1
        boundary = computed // block_size * block_size
        if boundary < running:
            continue
        bias, target = boundary - running, boundary // block_size - 1
        if column == target:
            num_accepted_tokens_out_ptr[request] = 1
        if steps is not None:
            cuts.append((request, column, target, bias + 1))
        elif column != target or bias != 0:
            pages.copy(request, column, target, bias)
    if steps is not None:
        steps.boundary(cuts)


def _entry(values: Tensor | None, request: int) -> int:
    if values is None:
        raise ValueError("the scheduled and drafted token counts are needed unless the new count is given")
    return int(values[request])


OVERRIDES: dict[str, Any] = {
    "vllm.v1.worker.mamba_utils.precopy_mamba_align_fused_kernel": precopy,
    "vllm.v1.worker.mamba_utils.postprocess_mamba_fused_kernel": postprocess,
}
"""vLLM's kernel names and what stands in for them."""
