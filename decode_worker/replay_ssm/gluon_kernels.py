# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""A whole step of a layer in one launch, in Gluon for Hopper: a program a (request, head).

The program asks for its window's inputs, then for the head's state [128, 128], 64 KiB on their way into shared memory
while the warps compute what they need of the window (``gluon_prepare.py``). Two programs fit on a multiprocessor, so
that one computes while the other one reads or writes. That order matters: behind 64 KiB of state, the inputs arrive
microseconds later.

Once there, everything a warp needs of S lies where the tensor cores want it, from the load to the store. A warp owns 16
rows of V at a time. Four lanes share a row and each holds 4 consecutive channels of every 16: a store of 16 bytes a
lane touches 64 consecutive bytes a row, and the same registers are the A operand of an m16n8k8 product, because the
order in which a product runs over K is free as long as both operands share it (``k_width`` = 4). S times the window's
2 T rows gives [BV, 2 T] accumulators, whose registers are again, with ``k_width`` = 2, the A operand of the second
product, by the T x T triangle.

A fp32 product is three tf32 products of a head (rounded to 11 bits) and a rest, each accumulated apart; what is
dropped is below 2^-21 of a term. What nobody reads again soon is stored with ``POLICY`` "evict_first". Written against
Triton 3.6.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from decode_worker.replay_ssm.gluon_prepare import (
    copy_to_shared,
    send_for_state,
    thread_barrier,
    window_vectors,
)


@gluon.jit
def _head(x):
    """The 11 leading bits of ``x``, rounded: what tf32 holds."""
    bits = x.to(gl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(gl.float32, bitcast=True)


@gluon.jit
def wait_for_previous_kernel():
    """Wait until everything the kernel before has written is visible."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_next_kernel_start():
    """The next kernel's programs may be placed once every program of this one is past this point."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def multiply(s, x, big, small):
    """Add s [BV, C] times x [C, N] to an accumulator of leading products and one of the corrections."""
    s_head = _head(s)
    x_head = _head(x)
    small = mma_v2(s - s_head, x_head, small, input_precision="tf32")
    small = mma_v2(s_head, x - x_head, small, input_precision="tf32")
    big = mma_v2(s_head, x_head, big, input_precision="tf32")
    return big, small


@gluon.jit
def _read_rows(buffer, base, count, PADDED: gl.constexpr, K: gl.constexpr, COPY: gl.constexpr):
    rows = gl.arange(0, PADDED, layout=gl.SliceLayout(1, COPY))
    columns = gl.arange(0, K, layout=gl.SliceLayout(0, COPY))
    ptr = base + rows[:, None] * K + columns[None, :]
    copy_to_shared(buffer, ptr, mask=rows[:, None] < count)


@gluon.jit
def advance_window(
    x, weight, conv, raw_g, raw_beta, a_log, dt_bias,
    records_kg, cu, slots, read_rows, write_rows, pending, write_at, conv_first,
    state, records_u, out, lower_bound, flush_at,
    s_x, s_ww, s_conv_slot, s_conv_col, s_conv_chan, s_g, s_beta, s_kg_row, s_kg_head,
    s_state, s_u_row, s_u_head, s_out,
    H,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, TP: gl.constexpr, WIDTH: gl.constexpr,
    DROP: gl.constexpr, BOUNDED: gl.constexpr, NW: gl.constexpr, PDL: gl.constexpr, POLICY: gl.constexpr,
    STREAM: gl.constexpr, TILES: gl.constexpr, DEEP: gl.constexpr,
):  # fmt: skip
    """One program a (request, head). Arguments as in ``triton_kernels.prepare_window`` and ``advance_state``, but
    ``weight`` [4, C], K = V, and at most 8 records a row; BV is 16 rows of V a warp. With STREAM only BV rows of the
    state lie in shared memory at a time, so that more programs fit on a multiprocessor."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, NW], [1, 0])
    M: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [1, NW], [1, 0])
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
    RESIDENT: gl.constexpr = 1 if STREAM else NV
    MOST: gl.constexpr = DEEP if TILES == 1 else TILES * TP - 1
    if PDL:
        wait_for_previous_kernel()
        let_next_kernel_start()
    pid = gl.program_id(0)
    b = pid // H
    h = pid % H
    slot = gl.load(slots + b).to(gl.int64)
    row0 = gl.load(cu + b).to(gl.int64)
    length = (gl.load(cu + b + 1).to(gl.int64) - row0).to(gl.int32)
    n = gl.load(pending + b)
    first = gl.load(conv_first + b)
    read_row = gl.load(read_rows + b).to(gl.int64)
    write_row = gl.load(write_rows + b).to(gl.int64)
    at = gl.load(write_at + b)
    r_acc = gl.arange(0, R, layout=gl.SliceLayout(0, MMA))
    o_mask = (r_acc >= TP) & (r_acc - TP < length)
    if slot > 0:
        s_buf = gl.allocate_shared_memory(gl.float32, [RESIDENT, BV, K], SWIZZLED)
        x_buf = gl.allocate_shared_memory(gl.float32, [R, K], SWIZZLED)
        k_buf = gl.allocate_shared_memory(gl.float32, [TILES, TP, K], PLAIN)
        w_buf = gl.allocate_shared_memory(gl.float32, [1, K], PLAIN)
        v_buf = gl.allocate_shared_memory(gl.float32, [TP, V], PLAIN)
        u_buf = gl.allocate_shared_memory(gl.float32, [TILES, TP, V], PLAIN)
        z_buf = gl.allocate_shared_memory(gl.float32, [R, R], PLAIN)
        u_ptr = records_u + read_row * s_u_row + h * s_u_head
        for tile in gl.static_range(TILES):
            _read_rows(u_buf.index(tile), u_ptr + tile * TP * V, n - tile * TP, TP, V, COPY)
        async_copy.commit_group()
        window_vectors(
            x, weight, conv, raw_g, raw_beta, a_log, dt_bias, records_kg, lower_bound,
            slot, row0, length, n, first, read_row, write_row, at, h,
            s_x, s_ww, s_conv_slot, s_conv_col, s_conv_chan, s_g, s_beta, s_kg_row, s_kg_head,
            H, x_buf, v_buf, k_buf, w_buf, z_buf, s_buf, state, s_state,
            K, TP, WIDTH, DROP, BOUNDED, L, M, POLICY, COPY, BV, RESIDENT, TILES, DEEP,
        )  # fmt: skip
        m_t = gl.arange(0, TP, layout=gl.SliceLayout(1, M))
        m_c = gl.arange(0, TP, layout=gl.SliceLayout(0, M))
        none = gl.zeros([TP, TP], gl.float32, M)
        z_buf.slice(0, TP).slice(TP, TP, dim=1).store(none)
        z_buf.slice(TP, TP).slice(TP, TP, dim=1).store(gl.where(m_t[:, None] == m_c[None, :], 1.0, none))
        async_copy.wait_group(0)
        thread_barrier()
        z = z_buf.permute([1, 0]).load(LB2)
        zero = gl.zeros([BV, R], gl.float32, MMA)
        for part in gl.static_range(NV):
            if STREAM and part > 0:
                async_copy.wait_group(0)
            # Without it the compiler keeps in registers what both halves read.
            thread_barrier()
            v_s = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, LA))
            v_acc = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, MMA))
            ss = s_buf.index(part % RESIDENT)
            kk = w_buf
            s0 = ss.slice(0, C, dim=1).load(LA) * kk.slice(0, C, dim=1).load(LA)
            s1 = ss.slice(C, C, dim=1).load(LA) * kk.slice(C, C, dim=1).load(LA)
            s2 = ss.slice(2 * C, C, dim=1).load(LA) * kk.slice(2 * C, C, dim=1).load(LA)
            s3 = ss.slice(3 * C, C, dim=1).load(LA) * kk.slice(3 * C, C, dim=1).load(LA)
            if STREAM and part + 1 < NV:
                # Every warp holds its rows: the next ones may come.
                thread_barrier()
                send_for_state(ss, state + slot * s_state, h, part + 1, K, BV, COPY)
                async_copy.commit_group()
            for j in gl.static_range(MOST):
                if j < n:
                    uu = u_buf.index(j // TP).permute([1, 0]).slice(part * BV, BV)
                    u = uu.slice(j % TP, 1, dim=1).load(LA)
                    key = k_buf.index(j // TP).slice(j % TP, 1)
                    s0 += u * key.slice(0, C, dim=1).load(LA)
                    s1 += u * key.slice(C, C, dim=1).load(LA)
                    s2 += u * key.slice(2 * C, C, dim=1).load(LA)
                    s3 += u * key.slice(3 * C, C, dim=1).load(LA)
            if n >= flush_at:
                c_s = gl.arange(0, C, layout=gl.SliceLayout(0, LA))
                s_ptr = state + slot * s_state + h * V * K + v_s[:, None] * K + c_s[None, :]
                gl.store(s_ptr, s0, eviction_policy=POLICY)
                gl.store(s_ptr + C, s1, eviction_policy=POLICY)
                gl.store(s_ptr + 2 * C, s2, eviction_policy=POLICY)
                gl.store(s_ptr + 3 * C, s3, eviction_policy=POLICY)
            big0, small = multiply(s0, x_buf.slice(0, C, dim=1).permute([1, 0]).load(LB), zero, zero)
            big0, small = multiply(s1, x_buf.slice(C, C, dim=1).permute([1, 0]).load(LB), big0, small)
            big1, small = multiply(s2, x_buf.slice(2 * C, C, dim=1).permute([1, 0]).load(LB), zero, small)
            big1, small = multiply(s3, x_buf.slice(3 * C, C, dim=1).permute([1, 0]).load(LB), big1, small)
            v = v_buf.permute([1, 0]).slice(part * BV, BV).load(MMA)
            seen = gl.join(v, gl.zeros([BV, TP], gl.float32, MMA)).permute([0, 2, 1]).reshape([BV, R])
            total = gl.convert_layout(seen, MMA, assert_trivial=True) + (small + (big0 + big1))
            big, small = multiply(gl.convert_layout(total, LA2), z, zero, zero)
            result = big + small
            wanted = o_mask[None, :] & (v_acc[:, None] >= 0)
            o_ptr = out + h * V + v_acc[:, None] + (row0 + r_acc[None, :] - TP) * s_out
            gl.store(o_ptr, result.to(out.dtype.element_ty), mask=wanted)
            u_out = (
                records_u + write_row * s_u_row + h * s_u_head + v_acc[:, None] + (at + r_acc[None, :]) * V
            )
            u_mask = (r_acc < TP) & (r_acc < length)
            gl.store(u_out, result, mask=u_mask[None, :] & (v_acc[:, None] >= 0), eviction_policy=POLICY)
    else:
        for part in gl.static_range(NV):
            v_acc = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, MMA))
            wanted = o_mask[None, :] & (v_acc[:, None] >= 0)
            o_ptr = out + h * V + v_acc[:, None] + (row0 + r_acc[None, :] - TP) * s_out
            gl.store(o_ptr, gl.zeros([BV, R], gl.float32, MMA).to(out.dtype.element_ty), mask=wanted)
