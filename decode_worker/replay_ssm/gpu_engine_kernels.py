# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What an engine's step needs beside the launch of a layer, in portable Triton.

``plan_step`` before the layers: where each window's records lie. ``commit_layers`` after sampling: how many records are
pending from now on; those that cannot wait for their request's next window are folded, in all layers at once.
``commit_step``: the same where none has to be folded. Arguments and shapes in ``gpu_engine.py``.
"""

import triton
import triton.language as tl

from decode_worker.replay_ssm.triton_kernels import _log_decay


# What changes from step to step is no reason for another compilation: it would fall into a served step.
@triton.jit(do_not_specialize=["windows", "s_state_indices"])
def plan_step(
    idx_mapping, request_indices, state_indices, query_start_loc, pending_by_request, base_by_request, parity,
    slots, cu, requests, read_rows, write_rows, pending, write_at, conv_first,
    windows, capacity, flush_at, s_state_indices,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program BLOCK windows. Rows behind ``windows`` become padding, so that a captured graph may be wider."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < windows
    batch_row = row
    if MAPPED:
        batch_row = tl.load(request_indices + row, mask=live, other=0)
    request = tl.load(idx_mapping + batch_row, mask=live, other=-1).to(tl.int32)
    slot = tl.load(state_indices + row * s_state_indices, mask=live, other=0).to(tl.int32)
    live = live & (slot > 0) & (request >= 0)
    n = tl.load(pending_by_request + request, mask=live, other=0)
    base = tl.load(base_by_request + request, mask=live, other=0)
    turn = tl.load(parity + request, mask=live, other=0)
    # A step that folds writes to the other row; one that does not appends to this one.
    folds = base + n >= flush_at
    after = tl.where(folds, 1 - turn, turn)
    behind = tl.where(folds, 0, base + n)
    inside = row < capacity
    tl.store(slots + row, tl.where(live, slot, 0), mask=inside)
    tl.store(requests + row, tl.where(live, request, -1), mask=inside)
    tl.store(read_rows + row, tl.where(live, 2 * request + turn, 0), mask=inside)
    tl.store(write_rows + row, tl.where(live, 2 * request + after, 0), mask=inside)
    tl.store(pending + row, base + n, mask=inside)
    tl.store(write_at + row, behind, mask=inside)
    tl.store(conv_first + row, tl.maximum(n - 1, 0), mask=inside)
    end = tl.load(query_start_loc + tl.minimum(row, windows))
    tl.store(cu + row, end.to(tl.int32), mask=row <= capacity)
    # The layers of this step fold what was pending, or leave it where it is, whatever becomes of the step.
    tl.store(pending_by_request + request, 0, mask=live)
    tl.store(base_by_request + request, behind, mask=live)
    tl.store(parity + request, after, mask=live)


@triton.jit
def _kept(sampled, cu, row, batch_row):
    """How many tokens a window keeps. At least its first: it was sampled before, or is the prompt's (none is then)."""
    length = tl.load(cu + row + 1) - tl.load(cu + row)
    return tl.minimum(tl.maximum(tl.load(sampled + batch_row).to(tl.int32), 1), length)


@triton.jit
def commit_step(
    sampled, request_indices, requests, slots, cu, pending_by_request,
    MAPPED: tl.constexpr,
):  # fmt: skip
    """One program a window: what it keeps is pending from now on."""
    row = tl.program_id(0)
    if tl.load(slots + row) <= 0:
        return
    batch_row = row
    if MAPPED:
        batch_row = tl.load(request_indices + row).to(tl.int32)
    tl.store(pending_by_request + tl.load(requests + row), _kept(sampled, cu, row, batch_row))


@triton.jit(do_not_specialize=["flush_all", "block_size", "table_width", "s_table_row", "s_table_col"])
def commit_layers(
    sampled, request_indices, requests, slots, cu, block_table, computed, pending_by_request, base_by_request,
    write_at, state_ref, states, conv_ref, convs, u_ref, us, kg_ref, kgs, a_log, dt_bias, rows, lower_bound,
    flush_all, block_size, table_width, s_table_row, s_table_col,
    s_state, s_conv_slot, s_conv_col, s_conv_chan, s_u_row, s_u_head, s_kg_row, s_kg_head,
    H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WIDTH: tl.constexpr, BOUNDED: tl.constexpr,
    MAPPED: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program a (window, layer, head). What the window kept is pending, if nobody reads the state before the next
    one. Otherwise it is folded, behind what earlier windows left in the row: all n records into the request's last
    block, the first m of them into the block whose end lies among them as well; the convolution's history moves to the
    front there.

    The convolution's cache holds W-2 columns of history and then the window, so n >= 1 accepted tokens end at column
    W-2 + n.
    """
    row = tl.program_id(0)
    layer = tl.program_id(1)
    h = tl.program_id(2)
    slot = tl.load(slots + row)
    if slot <= 0:
        return
    batch_row = row
    if MAPPED:
        batch_row = tl.load(request_indices + row).to(tl.int32)
    n = _kept(sampled, cu, row, batch_row)
    flush = flush_all > 0
    final = slot
    boundary = slot * 0
    m = n * 0
    if ALIGN:
        before = tl.load(computed + batch_row).to(tl.int32)
        after = before + n
        column = tl.minimum(tl.maximum(after - 1, 0) // block_size, table_width - 1)
        table = block_table + batch_row.to(tl.int64) * s_table_row
        final = tl.load(table + column * s_table_col).to(tl.int32)
        edge = (before // block_size + 1) * block_size
        crossed = after >= edge
        m = tl.where(crossed, edge - before, 0)
        boundary = tl.load(table + (edge // block_size - 1) * s_table_col, mask=crossed, other=0).to(tl.int32)
        m = tl.where(boundary > 0, m, 0)
        # The engine copies the state into the next block before a window that may reach it.
        near = (after + WINDOW - 1) // block_size != tl.maximum(after - 1, 0) // block_size
        flush = flush | crossed | near | (final != slot)
    flush = flush & (n > 0) & (final > 0)
    if (layer == 0) & (h == 0):
        tl.store(pending_by_request + tl.load(requests + row), tl.where(flush, 0, n))
        tl.store(base_by_request + tl.load(requests + row), 0, mask=flush)
    if not flush:
        return
    before_window = tl.load(write_at + row)
    source = slot.to(tl.int64)
    final = final.to(tl.int64)
    boundary = boundary.to(tl.int64)
    record = tl.load(rows + row).to(tl.int64)
    state = tl.load(states + layer).to(tl.pointer_type(state_ref.dtype.element_ty))
    conv = tl.load(convs + layer).to(tl.pointer_type(conv_ref.dtype.element_ty))
    u_ptr = tl.load(us + layer).to(tl.pointer_type(u_ref.dtype.element_ty)) + record * s_u_row + h * s_u_head
    kg = tl.load(kgs + layer).to(tl.pointer_type(kg_ref.dtype.element_ty)) + record * s_kg_row + h * s_kg_head
    ok = tl.arange(0, K)
    a = tl.exp(tl.load(a_log + layer * H + h))
    bias = tl.load(dt_bias + (layer * H + h) * K + ok)
    for part in range(V // BV):
        v1 = part * BV + tl.arange(0, BV)
        tile = h * V * K + v1[:, None] * K + ok[None, :]
        s = tl.load(state + source * s_state + tile)
        for j in range(0, before_window + n):
            k = tl.load(kg + j * 2 * K + ok).to(tl.float32)
            g = tl.load(kg + j * 2 * K + K + ok).to(tl.float32)
            k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
            s = s * tl.exp(_log_decay(g + bias, a, lower_bound, BOUNDED))[None, :]
            s += tl.load(u_ptr + j * V + v1)[:, None] * k[None, :]
            if (m > 0) & (j + 1 == before_window + m):
                tl.store(state + boundary * s_state + tile, s)
        tl.store(state + final * s_state + tile, s)
    r = tl.arange(0, 4)[:, None]
    c = h * K + ok[None, :]
    kept = r < WIDTH - 1
    early_kept = kept & (r < 4 * m)
    old = conv + source * s_conv_slot
    for part in range(3):
        channel = (part * H * K + c) * s_conv_chan
        early = tl.load(old + (m - 1 + r) * s_conv_col + channel, mask=early_kept, other=0.0)
        late = tl.load(old + (n - 1 + r) * s_conv_col + channel, mask=kept, other=0.0)
        tl.debug_barrier()
        tl.store(conv + boundary * s_conv_slot + r * s_conv_col + channel, early, mask=early_kept)
        tl.store(conv + final * s_conv_slot + r * s_conv_col + channel, late, mask=kept)
