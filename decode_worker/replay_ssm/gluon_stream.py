# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The pass over the state for large batches: ``advance_state`` as a persistent kernel that always reads ahead.

A program takes every P-th (request, head, BV rows of V) tile. While it folds and multiplies one tile, the next one is
on its way into shared memory with its window's vectors, so the memory never waits for the arithmetic. The registers
and products are those of ``gluon_kernels.py``. What nobody reads again soon is stored with ``POLICY`` "evict_first", so
that the prepared windows of the whole batch stay in the L2 cache until their turn comes. Written against Triton 3.6.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from decode_worker.replay_ssm.gluon_kernels import let_next_kernel_start, multiply, wait_for_previous_kernel


@gluon.jit
def _read_state(
    buffer,
    state,
    slot,
    tile,
    s_state,
    H,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    COPY: gl.constexpr,
):
    NV: gl.constexpr = V // BV
    rows = (tile // NV % H) * V + tile % NV * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, COPY))
    columns = gl.arange(0, K, layout=gl.SliceLayout(0, COPY))
    ptr = state + slot * s_state + rows[:, None] * K + columns[None, :]
    async_copy.async_copy_global_to_shared(buffer, ptr, mask=(rows[:, None] >= 0) & (slot > 0))


@gluon.jit
def _read_rows(buffer, base, count, PADDED: gl.constexpr, K: gl.constexpr, COPY: gl.constexpr):
    rows = gl.arange(0, PADDED, layout=gl.SliceLayout(1, COPY))
    columns = gl.arange(0, K, layout=gl.SliceLayout(0, COPY))
    ptr = base + rows[:, None] * K + columns[None, :]
    async_copy.async_copy_global_to_shared(buffer, ptr, mask=rows[:, None] < count)


@gluon.jit
def advance_stream(
    state, records_u, rows_x, values, triangle, keys_fold, out, cu, slots, read_rows, write_rows, pending, write_at,
    flush_at,
    s_state, s_u_row, s_u_head, s_out,
    H, tiles,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, TP: gl.constexpr, RP: gl.constexpr,
    NW: gl.constexpr, PDL: gl.constexpr, POLICY: gl.constexpr,
):  # fmt: skip
    """Programs as many as the chip holds; arguments as in ``triton_kernels.advance_state``."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1], [16, 8])
    LA: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    LB: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    LA2: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LB2: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    R: gl.constexpr = 2 * TP
    C: gl.constexpr = 32
    NV: gl.constexpr = V // BV
    NKF: gl.constexpr = 2 * RP
    s_buf = gl.allocate_shared_memory(gl.float32, [2, BV, K], SWIZZLED)
    x_buf = gl.allocate_shared_memory(gl.float32, [2, R, K], SWIZZLED)
    k_buf = gl.allocate_shared_memory(gl.float32, [2, NKF, K], PLAIN)
    step = gl.num_programs(0)
    tile = gl.program_id(0)
    slot = gl.load(slots + tile // NV // H).to(gl.int64)
    _read_state(s_buf.index(0), state, slot, tile, s_state, H, K, V, BV, COPY)
    if PDL:
        wait_for_previous_kernel()
        let_next_kernel_start()
    bh = (tile // NV).to(gl.int64)
    _read_rows(x_buf.index(0), rows_x + bh * R * K, gl.where(slot > 0, R, 0), R, K, COPY)
    _read_rows(k_buf.index(0), keys_fold + bh * (RP + 1) * K, gl.where(slot > 0, RP + 1, 0), NKF, K, COPY)
    async_copy.commit_group()
    stage = 0
    following = tile + step
    next_slot = gl.load(slots + gl.minimum(following, tiles - 1) // NV // H).to(gl.int64)
    while tile < tiles:
        part = tile % NV
        bh = (tile // NV).to(gl.int64)
        b = tile // NV // H
        h = tile // NV % H
        n = gl.load(pending + b)
        read_row = gl.load(read_rows + b).to(gl.int64)
        write_row = gl.load(write_rows + b).to(gl.int64)
        at = gl.load(write_at + b)
        row0 = gl.load(cu + b).to(gl.int64)
        length = (gl.load(cu + b + 1).to(gl.int64) - row0).to(gl.int32)
        v_s = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, LA))
        v_acc = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, MMA))
        r_acc = gl.arange(0, R, layout=gl.SliceLayout(0, MMA))
        u_ptr = records_u + read_row * s_u_row + h * s_u_head + v_s
        u0 = gl.load(u_ptr, mask=(v_s >= 0) & (n > 0) & (slot > 0), other=0.0)
        u1 = gl.load(u_ptr + V, mask=(v_s >= 0) & (n > 1) & (slot > 0), other=0.0)
        u2 = gl.load(u_ptr + 2 * V, mask=(v_s >= 0) & (n > 2) & (slot > 0), other=0.0)
        u3 = gl.load(u_ptr + 3 * V, mask=(v_s >= 0) & (n > 3) & (slot > 0), other=0.0)
        u4 = gl.load(u_ptr + 4 * V, mask=(v_s >= 0) & (n > 4) & (slot > 0), other=0.0)
        u5 = gl.load(u_ptr + 5 * V, mask=(v_s >= 0) & (n > 5) & (slot > 0), other=0.0)
        u6 = gl.load(u_ptr + 6 * V, mask=(v_s >= 0) & (n > 6) & (slot > 0), other=0.0)
        u7 = gl.load(u_ptr + 7 * V, mask=(v_s >= 0) & (n > 7) & (slot > 0), other=0.0)
        us = (u0, u1, u2, u3, u4, u5, u6, u7)
        v_ptr = values + bh * TP * V + v_acc[:, None] + r_acc[None, :] * V
        seen = gl.load(v_ptr, mask=(r_acc[None, :] < TP) & (v_acc[:, None] >= 0), other=0.0)
        c_z = gl.arange(0, R, layout=gl.SliceLayout(1, LB2))
        r_z = gl.arange(0, R, layout=gl.SliceLayout(0, LB2))
        z = gl.load(triangle + bh * R * R + c_z[:, None] + r_z[None, :] * R)
        async_copy.wait_group(0)
        gl.thread_barrier()
        # The other stage is free now, since every warp has passed this barrier.
        if following < tiles:
            other = 1 - stage
            _read_state(s_buf.index(other), state, next_slot, following, s_state, H, K, V, BV, COPY)
            next_bh = (following // NV).to(gl.int64)
            _read_rows(
                x_buf.index(other), rows_x + next_bh * R * K, gl.where(next_slot > 0, R, 0), R, K, COPY
            )
            _read_rows(
                k_buf.index(other),
                keys_fold + next_bh * (RP + 1) * K,
                gl.where(next_slot > 0, RP + 1, 0),
                NKF,
                K,
                COPY,
            )
        async_copy.commit_group()
        o_ptr = out + h * V + v_acc[:, None] + (row0 + r_acc[None, :] - TP) * s_out
        o_mask = ((r_acc >= TP) & (r_acc - TP < length))[None, :] & (v_acc[:, None] >= 0)
        if slot > 0:
            ss = s_buf.index(stage)
            kk = k_buf.index(stage)
            xx = x_buf.index(stage)
            s0 = ss.slice(0, C, dim=1).load(LA) * kk.slice(0, 1).slice(0, C, dim=1).load(LA)
            s1 = ss.slice(C, C, dim=1).load(LA) * kk.slice(0, 1).slice(C, C, dim=1).load(LA)
            s2 = ss.slice(2 * C, C, dim=1).load(LA) * kk.slice(0, 1).slice(2 * C, C, dim=1).load(LA)
            s3 = ss.slice(3 * C, C, dim=1).load(LA) * kk.slice(0, 1).slice(3 * C, C, dim=1).load(LA)
            for j in gl.static_range(RP):
                if j < n:
                    u = us[j][:, None]
                    s0 += u * kk.slice(j + 1, 1).slice(0, C, dim=1).load(LA)
                    s1 += u * kk.slice(j + 1, 1).slice(C, C, dim=1).load(LA)
                    s2 += u * kk.slice(j + 1, 1).slice(2 * C, C, dim=1).load(LA)
                    s3 += u * kk.slice(j + 1, 1).slice(3 * C, C, dim=1).load(LA)
            if n >= flush_at:
                c_s = gl.arange(0, C, layout=gl.SliceLayout(0, LA))
                s_ptr = state + slot * s_state + h * V * K + v_s[:, None] * K + c_s[None, :]
                gl.store(s_ptr, s0, eviction_policy=POLICY)
                gl.store(s_ptr + C, s1, eviction_policy=POLICY)
                gl.store(s_ptr + 2 * C, s2, eviction_policy=POLICY)
                gl.store(s_ptr + 3 * C, s3, eviction_policy=POLICY)
            zero = gl.zeros([BV, R], gl.float32, MMA)
            big0, small = multiply(s0, xx.slice(0, C, dim=1).permute([1, 0]).load(LB), zero, zero)
            big0, small = multiply(s1, xx.slice(C, C, dim=1).permute([1, 0]).load(LB), big0, small)
            big1, small = multiply(s2, xx.slice(2 * C, C, dim=1).permute([1, 0]).load(LB), zero, small)
            big1, small = multiply(s3, xx.slice(3 * C, C, dim=1).permute([1, 0]).load(LB), big1, small)
            total = seen.to(gl.float32) + (small + (big0 + big1))
            big, small = multiply(gl.convert_layout(total, LA2), z, zero, zero)
            result = big + small
            gl.store(o_ptr, result.to(out.dtype.element_ty), mask=o_mask)
            u_out = (
                records_u + write_row * s_u_row + h * s_u_head + v_acc[:, None] + (at + r_acc[None, :]) * V
            )
            u_mask = (r_acc < TP) & (r_acc < length)
            gl.store(u_out, result, mask=u_mask[None, :] & (v_acc[:, None] >= 0), eviction_policy=POLICY)
        else:
            gl.store(o_ptr, gl.zeros([BV, R], gl.float32, MMA).to(out.dtype.element_ty), mask=o_mask)
        stage = 1 - stage
        tile = following
        slot = next_slot
        following += step
        next_slot = gl.load(slots + gl.minimum(following, tiles - 1) // NV // H).to(gl.int64)
