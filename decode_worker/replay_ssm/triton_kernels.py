# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels of fold-at-start for Hopper: one prepares a window, one passes over the state.

``prepare_window`` runs once a (request, head): the short convolution with its columns, the gates, the keys' and
queries' decays, the T x T triangle and its inverse. It knows nothing of the state. ``advance_state`` runs once a
(request, head, part of V): it reads a tile of S once, folds the pending records, writes it back once, and takes the
two products of S with the window's T vectors as one product of 2 T rows. All that needs an exponential happens in the
first kernel, so that the second is bound by the bytes of S. With programmatic dependent launch the second kernel's
reads of S are on their way while the first one runs.

Products run on the tensor cores as three tf32 products a fp32 product (``DOT`` = "tf32x3"), which keeps about 21 bits
of every factor, or in plain fp32 ("ieee").

Only kernels are here; ``gpu_path.py`` checks arguments and launches. Imported lazily: Triton is no dependency of a
CPU installation. Written against Triton 3.6.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _log_decay(x, a, lower_bound, BOUNDED: tl.constexpr):
    """The gate of K3 (bounded) or of Kimi-Linear: log decay <= 0 of ``x`` = raw gate + bias."""
    if BOUNDED:
        return lower_bound * (1.0 / (1.0 + tl.exp(-a * x)))
    return -a * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _convolve(
    x,
    cache,
    weight,
    row0,
    first,
    length,
    channel,
    s_x,
    s_col,
    s_chan,
    s_wc,
    s_ww,
    DIM: tl.constexpr,
    TP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """SiLU(convolution) [TP, DIM] of a window for DIM channels from ``channel``; rows behind ``length`` are zero."""
    t = tl.arange(0, TP)[:, None]
    c = channel + tl.arange(0, DIM)[None, :]
    y = tl.zeros([TP, DIM], dtype=tl.float32)
    for w in tl.static_range(WIDTH):
        source = t + w - (WIDTH - 1)
        valid = t < length
        new = tl.load(x + (row0 + source) * s_x + c, mask=valid & (source >= 0), other=0.0)
        old = tl.load(cache + (first + t + w) * s_col + c * s_chan, mask=valid & (source < 0), other=0.0)
        tap = tl.load(weight + c * s_wc + w * s_ww).to(tl.float32)
        y += (new.to(tl.float32) + old.to(tl.float32)) * tap
    y = y / (1.0 + tl.exp(-y))
    return y.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _shift_columns(
    x, cache, row0, first, length, channel, s_x, s_col, s_chan, KEPT: tl.constexpr, DROP: tl.constexpr,
    DIM: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """Leave the kept history and then the window's raw rows in the cache. All reads of the cache come first."""
    r = tl.arange(0, 4)[:, None]
    t = tl.arange(0, TP)[:, None]
    c = channel + tl.arange(0, DIM)[None, :]
    kept = tl.load(cache + (first + DROP + r) * s_col + c * s_chan, mask=r < KEPT, other=0.0)
    rows = tl.load(x + (row0 + t) * s_x + c, mask=t < length, other=0.0)
    tl.debug_barrier()
    tl.store(cache + r * s_col + c * s_chan, kept, mask=r < KEPT)
    tl.store(cache + (KEPT + t) * s_col + c * s_chan, rows, mask=t < length)


@triton.jit
def prepare_window(
    x, weight, conv, raw_g, raw_beta, a_log, dt_bias,
    records_kg, cu, slots, read_rows, write_rows, pending, write_at, conv_first,
    rows_x, values, triangle, keys_fold, lower_bound,
    s_x, s_wc, s_ww, s_conv_slot, s_conv_col, s_conv_chan, s_g, s_beta, s_kg_row, s_kg_head,
    H,
    K: tl.constexpr, V: tl.constexpr, TP: tl.constexpr, RP: tl.constexpr, WIDTH: tl.constexpr,
    DROP: tl.constexpr, BOUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a (request, head); shapes and meaning of the arguments in ``gpu_path.py``."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    b = pid // H
    h = pid % H
    slot = tl.load(slots + b).to(tl.int64)
    if slot <= 0:
        return
    row0 = tl.load(cu + b).to(tl.int64)
    length = (tl.load(cu + b + 1).to(tl.int64) - row0).to(tl.int32)
    n = tl.load(pending + b)
    first = tl.load(conv_first + b)
    read_row = tl.load(read_rows + b).to(tl.int64)
    write_row = tl.load(write_rows + b).to(tl.int64)
    at = tl.load(write_at + b)
    ok = tl.arange(0, K)
    t1 = tl.arange(0, TP)
    t = t1[:, None]
    kk = ok[None, :]
    live = t < length
    a = tl.exp(tl.load(a_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + ok).to(tl.float32)

    # Pending records: keys decayed to the end of the fold. The sums run from the end, exclusive, so that a strong
    # decay before a weak one costs no digits of the weak one.
    j1 = tl.arange(0, RP)
    j = j1[:, None]
    kg = records_kg + read_row * s_kg_row + h * s_kg_head
    old_k = tl.load(kg + j * 2 * K + kk, mask=j < n, other=0.0).to(tl.float32)
    next_g = tl.load(kg + (j + 1) * 2 * K + K + kk, mask=j + 1 < n, other=0.0).to(tl.float32)
    next_g = tl.where(j + 1 < n, _log_decay(next_g + bias[None, :], a, lower_bound, BOUNDED), 0.0)
    first_g = tl.load(kg + K + ok, mask=ok < n * K, other=0.0).to(tl.float32)
    first_g = tl.where(ok < n * K, _log_decay(first_g + bias, a, lower_bound, BOUNDED), 0.0)
    to_end = tl.cumsum(next_g, axis=0, reverse=True)
    old_k *= tl.rsqrt(tl.sum(old_k * old_k, axis=1) + 1e-6)[:, None] * tl.exp(to_end)
    fold = keys_fold + pid.to(tl.int64) * (RP + 1) * K
    tl.store(fold + (j + 1) * K + kk, old_k, mask=j < n)
    tl.store(fold + ok, tl.exp(first_g + tl.sum(next_g, axis=0)))

    # The window: convolution, then its columns.
    cache = conv + slot * s_conv_slot
    q = _convolve(
        x, cache, weight, row0, first, length, h * K, s_x, s_conv_col, s_conv_chan, s_wc, s_ww, K, TP, WIDTH
    )
    raw_k = _convolve(
        x,
        cache,
        weight,
        row0,
        first,
        length,
        (H + h) * K,
        s_x,
        s_conv_col,
        s_conv_chan,
        s_wc,
        s_ww,
        K,
        TP,
        WIDTH,
    )
    v = _convolve(
        x, cache, weight, row0, first, length, 2 * H * K + h * V, s_x, s_conv_col, s_conv_chan, s_wc, s_ww,
        V, TP, WIDTH,
    )  # fmt: skip
    KEPT: tl.constexpr = WIDTH - 1 - DROP
    tl.debug_barrier()
    _shift_columns(x, cache, row0, first, length, h * K, s_x, s_conv_col, s_conv_chan, KEPT, DROP, K, TP)
    _shift_columns(
        x, cache, row0, first, length, (H + h) * K, s_x, s_conv_col, s_conv_chan, KEPT, DROP, K, TP
    )
    _shift_columns(
        x, cache, row0, first, length, 2 * H * K + h * V, s_x, s_conv_col, s_conv_chan, KEPT, DROP, V, TP
    )
    rg = tl.load(raw_g + (row0 + t) * s_g + h * K + kk, mask=live, other=0.0)
    beta = tl.load(raw_beta + (row0 + t1) * s_beta + h, mask=t1 < length, other=0.0).to(tl.float32)
    beta = tl.where(t1 < length, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    g = tl.where(live, _log_decay(rg.to(tl.float32) + bias[None, :], a, lower_bound, BOUNDED), 0.0)

    # Records of this window, behind those that stay.
    kg = records_kg + write_row * s_kg_row + h * s_kg_head
    tl.store(kg + (at + t) * 2 * K + kk, raw_k.to(records_kg.dtype.element_ty), mask=live)
    tl.store(kg + (at + t) * 2 * K + K + kk, rg.to(records_kg.dtype.element_ty), mask=live)
    v_out = values + pid.to(tl.int64) * TP * V
    tl.store(v_out + t * V + tl.arange(0, V)[None, :], v.to(values.dtype.element_ty))

    k = raw_k * tl.rsqrt(tl.sum(raw_k * raw_k, axis=1) + 1e-6)[:, None]
    q = q * (tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6) * (K**-0.5))[:, None]
    from_start = tl.exp(tl.cumsum(g, axis=0))
    out = rows_x + pid.to(tl.int64) * 2 * TP * K
    tl.store(out + t * K + kk, -k * from_start)
    tl.store(out + (TP + t) * K + kk, q * from_start)

    # The triangle: keys decayed to position i, row by row, by products of decays <= 1; and the inverse with it.
    decay = tl.exp(g)
    keys = tl.zeros([TP, K], dtype=tl.float32)
    column = t1[None, :]
    inverse = tl.zeros([TP, TP], dtype=tl.float32)
    scores = tl.zeros([TP, TP], dtype=tl.float32)
    for i in tl.static_range(TP):
        d_i = tl.sum(tl.where(t == i, decay, 0.0), axis=0)
        k_i = tl.sum(tl.where(t == i, k, 0.0), axis=0)
        q_i = tl.sum(tl.where(t == i, q, 0.0), axis=0)
        b_i = tl.sum(tl.where(t1 == i, beta, 0.0), axis=0)
        keys *= d_i[None, :]
        seen = tl.sum(keys * k_i[None, :], axis=1)
        keys = tl.where(t == i, k_i[None, :], keys)
        asked = tl.sum(keys * q_i[None, :], axis=1)
        row = tl.where(t1 == i, 1.0, 0.0) - b_i * tl.sum(seen[:, None] * inverse, axis=0)
        inverse = tl.where(t == i, row[None, :], inverse)
        scores = tl.where(t == i, tl.sum(asked[:, None] * inverse, axis=0)[None, :], scores)
    z = triangle + pid.to(tl.int64) * 4 * TP * TP
    tl.store(z + t * 2 * TP + column, inverse * beta[None, :])
    tl.store(z + (TP + t) * 2 * TP + column, scores * beta[None, :])


@triton.jit
def advance_state(
    state, records_u, rows_x, values, triangle, keys_fold, out, cu, slots, read_rows, write_rows, pending, write_at,
    flush_at,
    s_state, s_u_row, s_u_head, s_out,
    H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, TP: tl.constexpr, RP: tl.constexpr,
    DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a (request, head, BV rows of V)."""
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0)
    part = pid % NV
    bh = pid // NV
    b = bh // H
    h = bh % H
    slot = tl.load(slots + b).to(tl.int64)
    row0 = tl.load(cu + b).to(tl.int64)
    length = (tl.load(cu + b + 1).to(tl.int64) - row0).to(tl.int32)
    v1 = part * BV + tl.arange(0, BV)
    r = tl.arange(0, 2 * TP)[:, None]
    o_ptr = out + (row0 + r - TP) * s_out + h * V + v1[None, :]
    o_mask = (r >= TP) & (r - TP < length)
    if slot <= 0:
        tl.store(o_ptr, tl.zeros([2 * TP, BV], dtype=tl.float32).to(out.dtype.element_ty), mask=o_mask)
        return
    ok = tl.arange(0, K)
    s_ptr = state + slot * s_state + h * V * K + v1[:, None] * K + ok[None, :]
    s = tl.load(s_ptr)
    n = tl.load(pending + b)
    read_row = tl.load(read_rows + b).to(tl.int64)
    write_row = tl.load(write_rows + b).to(tl.int64)
    at = tl.load(write_at + b)
    u_ptr = records_u + read_row * s_u_row + h * s_u_head + v1
    j = tl.arange(0, max(RP, 16))
    u = tl.load(u_ptr[:, None] + j[None, :] * V, mask=j[None, :] < n, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    fold = keys_fold + bh.to(tl.int64) * (RP + 1) * K
    s = s * tl.load(fold + ok)[None, :]
    keys = tl.load(fold + (j[:, None] + 1) * K + ok[None, :], mask=j[:, None] < n, other=0.0)
    s = tl.dot(u, keys, acc=s, input_precision=DOT)
    if n >= flush_at:
        tl.store(s_ptr, s)
    xs = tl.load(rows_x + bh.to(tl.int64) * 2 * TP * K + r * K + ok[None, :])
    v_in = values + bh.to(tl.int64) * TP * V
    seen = tl.load(v_in + r * V + v1[None, :], mask=r < TP, other=0.0).to(tl.float32)
    seen = tl.dot(xs, tl.trans(s), acc=seen, input_precision=DOT)
    c = tl.arange(0, 2 * TP)[None, :]
    z = tl.load(triangle + bh.to(tl.int64) * 4 * TP * TP + r * 2 * TP + c)
    result = tl.dot(z, seen, input_precision=DOT)
    tl.store(o_ptr, result.to(out.dtype.element_ty), mask=o_mask)
    u_out = records_u + write_row * s_u_row + h * s_u_head + (at + r) * V + v1[None, :]
    tl.store(u_out, result, mask=(r < TP) & (r < length))


@triton.jit
def flush_pending(
    state, conv, records_u, records_kg, a_log, dt_bias, read_rows, counts, conv_first, sources, targets, lower_bound,
    s_state, s_conv_slot, s_conv_col, s_conv_chan, s_u_row, s_u_head, s_kg_row, s_kg_head,
    H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WIDTH: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """One program a (request, head, BV rows of V): fold ``counts`` records into the target slot, step by step.

    Rare (boundaries, preemption), so it favours plainness: the recurrence over the records, one at a time.
    """
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0)
    part = pid % NV
    h = pid // NV % H
    b = pid // NV // H
    source = tl.load(sources + b).to(tl.int64)
    target = tl.load(targets + b).to(tl.int64)
    if (source <= 0) | (target <= 0):
        return
    n = tl.load(counts + b)
    row = tl.load(read_rows + b).to(tl.int64)
    first = tl.load(conv_first + b)
    ok = tl.arange(0, K)
    v1 = part * BV + tl.arange(0, BV)
    tile = h * V * K + v1[:, None] * K + ok[None, :]
    a = tl.exp(tl.load(a_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + ok).to(tl.float32)
    s = tl.load(state + source * s_state + tile)
    kg = records_kg + row * s_kg_row + h * s_kg_head + ok
    u_ptr = records_u + row * s_u_row + h * s_u_head + v1
    for j in range(0, n):
        k = tl.load(kg + j * 2 * K).to(tl.float32)
        g = tl.load(kg + j * 2 * K + K).to(tl.float32)
        k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
        s = s * tl.exp(_log_decay(g + bias, a, lower_bound, BOUNDED))[None, :]
        s += tl.load(u_ptr + j * V)[:, None] * k[None, :]
    if (n > 0) | (source != target):
        tl.store(state + target * s_state + tile, s)
    if part == 0:
        r = tl.arange(0, 4)[:, None]
        c = h * K + ok[None, :]
        old = conv + source * s_conv_slot + (first + r) * s_conv_col
        new = conv + target * s_conv_slot + r * s_conv_col
        kept = r < WIDTH - 1
        q = tl.load(old + c * s_conv_chan, mask=kept, other=0.0)
        k = tl.load(old + (H * K + c) * s_conv_chan, mask=kept, other=0.0)
        v = tl.load(old + (2 * H * K + c) * s_conv_chan, mask=kept, other=0.0)
        tl.debug_barrier()
        tl.store(new + c * s_conv_chan, q, mask=kept)
        tl.store(new + (H * K + c) * s_conv_chan, k, mask=kept)
        tl.store(new + (2 * H * K + c) * s_conv_chan, v, mask=kept)
