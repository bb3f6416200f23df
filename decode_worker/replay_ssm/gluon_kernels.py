# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The pass over the state in Gluon: ``advance_state`` of ``triton_kernels.py`` with layouts chosen by hand.

Everything a warp needs of S stays where the tensor cores want it, from the load to the store. A warp owns 16 (or 32)
rows of V. Four lanes share a row and each holds 4 consecutive channels of every 16: a load of 16 bytes a lane touches
64 consecutive bytes a row, and the same registers are the A operand of an m16n8k8 product, because the order in which
a product runs over K is free as long as both operands share it (``k_width`` = 4). So there is no shared memory, no
barrier and no conversion: a program is as many independent warps as it has.

S [BV, K] times the window's 2 T rows gives [BV, 2 T] accumulators, whose registers are again, with ``k_width`` = 2,
the A operand of the second product, by the T x T triangle.

A fp32 product is three tf32 products of a head (rounded to 11 bits) and a rest, each accumulated apart; what is
dropped is below 2^-21 of a term. Written against Triton 3.6.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


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
def advance_state(
    state, records_u, rows_x, values, triangle, keys_fold, out, cu, slots, read_rows, write_rows, pending, write_at,
    flush_at,
    s_state, s_u_row, s_u_head, s_out,
    H,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, TP: gl.constexpr, RP: gl.constexpr, GROUP: gl.constexpr,
    NW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program a (request, head, BV rows of V); arguments as in ``triton_kernels.advance_state``."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1], [16, 8])
    LA: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    LB: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    LA2: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LB2: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    R: gl.constexpr = 2 * TP
    C: gl.constexpr = 32
    NV: gl.constexpr = V // BV
    pid = gl.program_id(0)
    part = pid % NV
    bh = pid // NV
    b = bh // H
    h = bh % H
    slot = gl.load(slots + b).to(gl.int64)
    row0 = gl.load(cu + b).to(gl.int64)
    length = (gl.load(cu + b + 1).to(gl.int64) - row0).to(gl.int32)
    v_acc = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, MMA))
    r_acc = gl.arange(0, R, layout=gl.SliceLayout(0, MMA))
    o_ptr = out + h * V + v_acc[:, None] + (row0 + r_acc[None, :] - TP) * s_out
    o_mask = (r_acc >= TP) & (r_acc - TP < length)
    o_mask = o_mask[None, :] & (v_acc[:, None] >= 0)
    if slot <= 0:
        gl.store(o_ptr, gl.zeros([BV, R], gl.float32, MMA).to(out.dtype.element_ty), mask=o_mask)
    else:
        v_s = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, LA))
        c_s = gl.arange(0, C, layout=gl.SliceLayout(0, LA))
        s_ptr = state + slot * s_state + h * V * K + v_s[:, None] * K + c_s[None, :]
        s0 = gl.load(s_ptr)
        s1 = gl.load(s_ptr + C)
        s2 = gl.load(s_ptr + 2 * C)
        s3 = gl.load(s_ptr + 3 * C)
        n = gl.load(pending + b)
        read_row = gl.load(read_rows + b).to(gl.int64)
        write_row = gl.load(write_rows + b).to(gl.int64)
        at = gl.load(write_at + b)
        u_ptr = records_u + read_row * s_u_row + h * s_u_head + v_s
        if PDL:
            wait_for_previous_kernel()
            let_next_kernel_start()
        fold = keys_fold + bh.to(gl.int64) * (RP + 1) * K
        s0 *= gl.load(fold + c_s)[None, :]
        s1 *= gl.load(fold + C + c_s)[None, :]
        s2 *= gl.load(fold + 2 * C + c_s)[None, :]
        s3 *= gl.load(fold + 3 * C + c_s)[None, :]
        for j0 in range(0, n, GROUP):
            for i in gl.static_range(GROUP):
                j = j0 + i
                u = gl.load(u_ptr + j * V, mask=j < n, other=0.0)[:, None]
                k_ptr = fold + (j + 1) * K + c_s
                s0 += u * gl.load(k_ptr, mask=j < n, other=0.0)[None, :]
                s1 += u * gl.load(k_ptr + C, mask=j < n, other=0.0)[None, :]
                s2 += u * gl.load(k_ptr + 2 * C, mask=j < n, other=0.0)[None, :]
                s3 += u * gl.load(k_ptr + 3 * C, mask=j < n, other=0.0)[None, :]
        if n >= flush_at:
            gl.store(s_ptr, s0)
            gl.store(s_ptr + C, s1)
            gl.store(s_ptr + 2 * C, s2)
            gl.store(s_ptr + 3 * C, s3)
        c_x = gl.arange(0, C, layout=gl.SliceLayout(1, LB))
        r_x = gl.arange(0, R, layout=gl.SliceLayout(0, LB))
        x_ptr = rows_x + bh.to(gl.int64) * R * K + c_x[:, None] + r_x[None, :] * K
        v_ptr = values + bh.to(gl.int64) * TP * V + v_acc[:, None] + r_acc[None, :] * V
        seen = gl.load(v_ptr, mask=(r_acc[None, :] < TP) & (v_acc[:, None] >= 0), other=0.0).to(gl.float32)
        zero = gl.zeros([BV, R], gl.float32, MMA)
        big0, small = multiply(s0, gl.load(x_ptr), zero, zero)
        big0, small = multiply(s1, gl.load(x_ptr + C), big0, small)
        big1, small = multiply(s2, gl.load(x_ptr + 2 * C), zero, small)
        big1, small = multiply(s3, gl.load(x_ptr + 3 * C), big1, small)
        seen = seen + (small + (big0 + big1))
        c_z = gl.arange(0, R, layout=gl.SliceLayout(1, LB2))
        r_z = gl.arange(0, R, layout=gl.SliceLayout(0, LB2))
        z = gl.load(triangle + bh.to(gl.int64) * R * R + c_z[:, None] + r_z[None, :] * R)
        big, small = multiply(gl.convert_layout(seen, LA2), z, zero, zero)
        result = big + small
        gl.store(o_ptr, result.to(out.dtype.element_ty), mask=o_mask)
        u_out = records_u + write_row * s_u_row + h * s_u_head + v_acc[:, None] + (at + r_acc[None, :]) * V
        u_mask = (r_acc < TP) & (r_acc < length)
        gl.store(u_out, result, mask=u_mask[None, :] & (v_acc[:, None] >= 0))
