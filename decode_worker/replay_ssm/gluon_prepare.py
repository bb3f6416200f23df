# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What the pass over the state needs of a window, in Gluon: the first half of ``gluon_kernels.py``.

Every [8, 128] tensor gives a position a group of four lanes and a lane 4 consecutive channels of every 16, so sums over
channels take two shuffles (and one exchange between warps), and what lies one position back is one shuffle away. The
triangle is built by distance: w_d[i] = key of position i-d decayed to i = e^(g_i) w_(d-1)[i-1], all decays <= 1, so no
gate can overflow it.

What bounds this is latency: no read depends on more than the row of the plan, sums are taken several at a time, and
exponentials are the hardware's (2 units in the last place). Written against Triton 3.6.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Tritons after 3.6 have them under other names.
_OLD = hasattr(gl, "thread_barrier")
thread_barrier = gl.thread_barrier if _OLD else gl.barrier
copy_to_shared = (
    async_copy.async_load
    if not _OLD and hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _sigmoid(x):
    return _reciprocal(1.0 + _exp2(-LOG2_E * x))


@gluon.jit
def _log2_decay(x, a, lower_bound, BOUNDED: gl.constexpr):
    """log2 of the decay of ``x`` = raw gate + bias, with the gate of K3 (bounded) or of Kimi-Linear (softplus)."""
    if BOUNDED:
        return (lower_bound * LOG2_E) * _reciprocal(1.0 + _exp2((-LOG2_E * a) * x))
    # The hardware's logarithm is off by 2^-22 near 1, the same way every token: too much for a slow decay.
    return (-LOG2_E * a) * gl.where(x > 20.0, x, gl.log(1.0 + gl.exp(gl.minimum(x, 20.0))))


@gluon.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@gluon.jit
def _add7(a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, b5, b6):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6


@gluon.jit
def _add5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@gluon.jit
def _convolve(x_ptr, s_x, cache_ptr, s_col, w_ptr, s_ww, t, length, WIDTH: gl.constexpr):
    """SiLU(convolution) [8, 128], rounded as the model rounds, and the raw rows. What a tap multiplies comes from the
    cache before the window, else from it; behind ``length`` everything is zero."""
    rows = gl.load(x_ptr + t[:, None] * s_x, mask=(t < length)[:, None], other=0.0)
    y = rows.to(gl.float32) * gl.load(w_ptr + (WIDTH - 1) * s_ww).to(gl.float32)[None, :]
    for w in gl.static_range(WIDTH - 1):
        source = t[:, None] + (w - (WIDTH - 1))
        ptr = gl.where(source >= 0, x_ptr + source * s_x, cache_ptr + (t[:, None] + w) * s_col)
        tap = gl.load(ptr, mask=(t < length)[:, None], other=0.0)
        y += tap.to(gl.float32) * gl.load(w_ptr + w * s_ww).to(gl.float32)[None, :]
    return (y * _sigmoid(y)).to(rows.dtype).to(gl.float32), rows


@gluon.jit
def _pending_rows(kg, base, n, t, t2, c, TP: gl.constexpr, K: gl.constexpr):
    """Keys of records ``base`` to ``base`` + 7, and the gates one row on: row j of the keys takes the decays of the
    rows behind it. The last row has none behind it in this tile; there the gate of the tile's first row is read, which
    the tiles before it and the state meet."""
    after = base + gl.where(t2 == TP - 1, 0, t2 + 1)
    old_k = gl.load(kg + (base + t)[:, None] * 2 * K + c[None, :], mask=(base + t < n)[:, None], other=0.0)
    old_g = gl.load(kg + after * 2 * K + K + c[None, :], mask=after < n, other=0.0)
    return old_k.to(gl.float32), old_g


@gluon.jit
def _decayed_keys(
    old_k, old_sum, old_g, bias, a, lower_bound, base, n, t2, tail, TP: gl.constexpr, BOUNDED: gl.constexpr,
    STEPS: gl.constexpr,
):  # fmt: skip
    """Keys of one tile of records, decayed to the end of the fold, ``tail`` [K] behind the tile; and the new tail."""
    after = base + gl.where(t2 == TP - 1, 0, t2 + 1)
    old_g = gl.where(
        after < n, _log2_decay(old_g.to(gl.float32) + bias[None, :], a, lower_bound, BOUNDED), 0.0
    )
    behind = gl.where(t2 == TP - 1, 0.0, old_g)
    for e in gl.static_range(STEPS):
        other = gl.gather(behind, gl.minimum(t2 + (1 << e), TP - 1), axis=0)
        behind = gl.where(t2 + (1 << e) < TP, behind + other, behind)
    keys = old_k * gl.rsqrt(old_sum + 1e-6)[:, None] * _exp2(behind + tail[None, :])
    return keys, tail + gl.sum(old_g, 0)


@gluon.jit
def send_for_state(buffer, state, h, part, K: gl.constexpr, BV: gl.constexpr, COPY: gl.constexpr):
    """Ask for rows ``part`` * BV and following of head ``h`` of the slot ``state``."""
    rows = h * K + part * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, COPY))
    columns = gl.arange(0, K, layout=gl.SliceLayout(0, COPY))
    copy_to_shared(buffer, state + rows[:, None] * K + columns[None, :])


@gluon.jit
def window_vectors(
    x, weight, conv, raw_g, raw_beta, a_log, dt_bias, records_kg, lower_bound,
    slot, row0, length, n, first, read_row, write_row, at, h,
    s_x, s_ww, s_conv_slot, s_conv_col, s_conv_chan, s_g, s_beta, s_kg_row, s_kg_head,
    H, to_rows, to_values, to_keys, to_whole, to_triangle, s_buf, state, s_state,
    K: gl.constexpr, TP: gl.constexpr, WIDTH: gl.constexpr, DROP: gl.constexpr, BOUNDED: gl.constexpr,
    L: gl.constexpr, M: gl.constexpr, POLICY: gl.constexpr, COPY: gl.constexpr, BV: gl.constexpr,
    RESIDENT: gl.constexpr, TILES: gl.constexpr, DEEP: gl.constexpr,
):  # fmt: skip
    """Head ``h`` of one window: its vectors to shared memory, the convolution's columns and the records to the caches.

    Stored as soon as they are known: -K e^G and Q e^G [16, 128]; V [8, 128]; the pending keys, decayed to the end of
    the fold [8, 128]; the decay of the whole fold (the last row of [8, 128]; the others mean nothing); T beta and
    P T beta, with T = (I + A)^-1, the left half of [16, 16].

    The first RESIDENT parts of the head's state are sent for, to ``s_buf``, when everything else has been asked for:
    behind 64 KiB, these few bytes would keep everybody waiting.
    """
    LT: gl.constexpr = gl.SliceLayout(1, L)
    LC: gl.constexpr = gl.SliceLayout(0, L)
    MR: gl.constexpr = gl.SliceLayout(1, M)
    KEPT: gl.constexpr = WIDTH - 1 - DROP
    STEPS: gl.constexpr = 1 if DEEP == 2 else (2 if DEEP == 4 else 3)
    t = gl.arange(0, TP, layout=LT)
    c = gl.arange(0, K, layout=LC)
    a = _exp2(LOG2_E * gl.load(a_log + h).to(gl.float32))
    bias = gl.load(dt_bias + h * K + c).to(gl.float32)
    w_ptr = weight + h * K + c
    t2 = t[:, None] + gl.zeros([TP, K], gl.int32, L)
    live = (t < length)[:, None]
    kg = records_kg + read_row * s_kg_row + h * s_kg_head
    old_k0, old_g0 = _pending_rows(kg, 0, n, t, t2, c, TP, K)
    if TILES > 1:
        old_k1, old_g1 = _pending_rows(kg, TP, n, t, t2, c, TP, K)
        old_k2, old_g2 = _pending_rows(kg, 2 * TP, n, t, t2, c, TP, K)
    rg = gl.load(raw_g + (row0 + t[:, None]) * s_g + (h * K + c)[None, :], mask=live, other=0.0)
    m_t = gl.arange(0, TP, layout=MR)
    m_c = gl.arange(0, TP, layout=gl.SliceLayout(0, M))
    r_beta = gl.load(raw_beta + (row0 + m_t) * s_beta + h, mask=m_t < length, other=0.0).to(gl.float32)
    c_beta = gl.load(raw_beta + (row0 + m_c) * s_beta + h, mask=m_c < length, other=0.0).to(gl.float32)
    x_ptr = x + row0 * s_x + (h * K + c)[None, :] + gl.zeros([TP, K], gl.int32, L)
    cache_ptr = conv + slot * s_conv_slot + first * s_conv_col + (h * K + c)[None, :] * s_conv_chan
    cache_ptr = cache_ptr + gl.zeros([TP, K], gl.int32, L)
    x_part = H * K
    c_part = H * K * s_conv_chan
    k, k_rows = _convolve(
        x_ptr + x_part, s_x, cache_ptr + c_part, s_conv_col, w_ptr + x_part, s_ww, t, length, WIDTH
    )
    q, q_rows = _convolve(x_ptr, s_x, cache_ptr, s_conv_col, w_ptr, s_ww, t, length, WIDTH)
    v, v_rows = _convolve(
        x_ptr + 2 * x_part,
        s_x,
        cache_ptr + 2 * c_part,
        s_conv_col,
        w_ptr + 2 * x_part,
        s_ww,
        t,
        length,
        WIDTH,
    )
    kept = (t < KEPT)[:, None]
    kept_ptr = cache_ptr + (DROP + t[:, None]) * s_conv_col
    q_kept = gl.load(kept_ptr, mask=kept, other=0.0)
    k_kept = gl.load(kept_ptr + c_part, mask=kept, other=0.0)
    v_kept = gl.load(kept_ptr + 2 * c_part, mask=kept, other=0.0)

    # Every warp has read the cache; now its columns: what stays of the history, then the window.
    thread_barrier()
    for part in gl.static_range(RESIDENT):
        send_for_state(s_buf.index(part), state + slot * s_state, h, part, K, BV, COPY)
    async_copy.commit_group()
    to_ptr = conv + slot * s_conv_slot + t[:, None] * s_conv_col + (h * K + c)[None, :] * s_conv_chan
    gl.store(to_ptr, q_kept, mask=kept, eviction_policy=POLICY)
    gl.store(to_ptr + c_part, k_kept, mask=kept, eviction_policy=POLICY)
    gl.store(to_ptr + 2 * c_part, v_kept, mask=kept, eviction_policy=POLICY)
    to_ptr += KEPT * s_conv_col
    gl.store(to_ptr, q_rows, mask=live, eviction_policy=POLICY)
    gl.store(to_ptr + c_part, k_rows, mask=live, eviction_policy=POLICY)
    gl.store(to_ptr + 2 * c_part, v_rows, mask=live, eviction_policy=POLICY)
    to_values.store(v)
    # Records of this window, behind those that stay; they keep what the model gave.
    kg = records_kg + write_row * s_kg_row + h * s_kg_head + (at + t[:, None]) * 2 * K + c[None, :]
    gl.store(kg, k.to(records_kg.dtype.element_ty), mask=live, eviction_policy=POLICY)
    gl.store(kg + K, rg, mask=live, eviction_policy=POLICY)

    g = gl.where(live, _log2_decay(rg.to(gl.float32) + bias[None, :], a, lower_bound, BOUNDED), 0.0)
    if TILES > 1:
        k_sum, q_sum, sum0, sum1, sum2 = gl.reduce(
            (k * k, q * q, old_k0 * old_k0, old_k1 * old_k1, old_k2 * old_k2), 1, _add5
        )
    else:
        k_sum, q_sum, sum0 = gl.reduce((k * k, q * q, old_k0 * old_k0), 1, _add3)
    k = k * gl.rsqrt(k_sum + 1e-6)[:, None]
    q = q * (gl.rsqrt(q_sum + 1e-6) * (K**-0.5))[:, None]
    # Decays over several tokens are sums before they are powers: e^g of a very slow decay rounds to 1, its sum does
    # not. No exponent is ever positive, so none overflows.
    from_start = g
    for e in gl.static_range(STEPS):
        other = gl.gather(from_start, gl.maximum(t2 - (1 << e), 0), axis=0)
        from_start = gl.where(t2 >= (1 << e), from_start + other, from_start)
    from_start = _exp2(from_start)
    d = _exp2(g)
    to_rows.slice(0, TP).store(-k * from_start)
    to_rows.slice(TP, TP).store(q * from_start)

    # The triangle by distance: w is the key `distance` positions back, decayed to here.
    back = gl.maximum(t2 - 1, 0)
    w1 = d * gl.gather(k, back, axis=0)
    if DEEP == 2:
        p0, a1, p1 = gl.reduce((q * k, k * w1, q * w1), 1, _add3)
        keys = (a1, a1)
        asks = (p0, p1)
    else:
        w2 = d * gl.gather(w1, back, axis=0)
        w3 = d * gl.gather(w2, back, axis=0)
        if DEEP == 4:
            p0, a1, p1, a2, p2, a3, p3 = gl.reduce(
                (q * k, k * w1, q * w1, k * w2, q * w2, k * w3, q * w3), 1, _add7
            )
            keys = (a1, a1, a2, a3)
            asks = (p0, p1, p2, p3)
        else:
            p0, a1, p1, a2, p2 = gl.reduce((q * k, k * w1, q * w1, k * w2, q * w2), 1, _add5)
            w4 = d * gl.gather(w3, back, axis=0)
            w5 = d * gl.gather(w4, back, axis=0)
            a3, p3, a4, p4, a5 = gl.reduce((k * w3, q * w3, k * w4, q * w4, k * w5), 1, _add5)
            w6 = d * gl.gather(w5, back, axis=0)
            w7 = d * gl.gather(w6, back, axis=0)
            p5, a6, p6, a7, p7 = gl.reduce((q * w5, k * w6, q * w6, k * w7, q * w7), 1, _add5)
            keys = (a1, a1, a2, a3, a4, a5, a6, a7)
            asks = (p0, p1, p2, p3, p4, p5, p6, p7)

    # Pending keys, decayed to the end of the fold, the last tile first.
    OLD_STEPS: gl.constexpr = STEPS if TILES == 1 else 3
    tail = gl.zeros([K], gl.float32, LC)
    if TILES > 1:
        keys2, tail = _decayed_keys(
            old_k2, sum2, old_g2, bias, a, lower_bound, 2 * TP, n, t2, tail, TP, BOUNDED, OLD_STEPS
        )
        to_keys.index(2).store(keys2)
        keys1, tail = _decayed_keys(
            old_k1, sum1, old_g1, bias, a, lower_bound, TP, n, t2, tail, TP, BOUNDED, OLD_STEPS
        )
        to_keys.index(1).store(keys1)
    keys0, tail = _decayed_keys(
        old_k0, sum0, old_g0, bias, a, lower_bound, 0, n, t2, tail, TP, BOUNDED, OLD_STEPS
    )
    to_keys.index(0).store(keys0)
    to_whole.store(_exp2(gl.expand_dims(tail, 0)))

    # The inverse by forward substitution, and the scores times the inverse: row j is final when step j uses it.
    m_beta = gl.where(m_t < length, _sigmoid(r_beta), 0.0)
    inverse = gl.where(m_t[:, None] == m_c[None, :], 1.0, gl.zeros([TP, TP], gl.float32, M))
    product = gl.zeros([TP, TP], gl.float32, M)
    m_row = m_t[:, None] + gl.zeros([TP, TP], gl.int32, M)
    for j in gl.static_range(DEEP):
        below = gl.zeros([TP], gl.float32, MR)
        score = gl.where(m_t == j, gl.convert_layout(asks[0], MR), below)
        for distance in gl.static_range(1, DEEP - j):
            here = m_t == j + distance
            below = gl.where(here, gl.convert_layout(keys[distance], MR), below)
            score = gl.where(here, gl.convert_layout(asks[distance], MR), score)
        row = gl.gather(inverse, m_row * 0 + j, axis=0)
        inverse -= (m_beta * below)[:, None] * row
        product += score[:, None] * row
    scale = gl.where(m_c < length, _sigmoid(c_beta), 0.0)[None, :]
    to_triangle.slice(0, TP).slice(0, TP, dim=1).store(inverse * scale)
    to_triangle.slice(TP, TP).slice(0, TP, dim=1).store(product * scale)
