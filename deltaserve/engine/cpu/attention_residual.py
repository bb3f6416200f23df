# SPDX-License-Identifier: Apache-2.0
"""K3's attention residual: a layer's input is a softmax mix over the block sums so far, not their plain sum.

For sources s_0 .. s_R (the finished blocks, then the running prefix), with RMS norm weight n and query w::

    logit_r = <s_r n, w> / sqrt(mean(s_r^2) + eps);   mixed = sum_r softmax(logit)_r s_r

optionally followed by an RMS norm. Sums in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE_BYTES = 16 << 20


def attention_residual(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    norm_weight: Tensor,
    qk_weight: Tensor,
    output_norm_weight: Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    *,
    quant_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the mix [T, D]; add ``delta`` to ``prefix`` and store it as block ``block_write_idx`` (if >= 0), in place.

    ``prefix``, ``delta`` [T, D]; ``blocks`` [T, R, D], of which the first ``num_blocks`` are sources. The signature is
    the one vLLM's models call; ``quant_dtype`` is for its fp8 output, which a CPU has no use for.

    Raises ValueError if ``quant_dtype`` is given.
    """
    if quant_dtype is not None:
        raise ValueError(f"quant_dtype={quant_dtype}: the CPU engine has no quantized attention residual")
    if delta is not None:
        prefix.add_(delta)
    if block_write_idx >= 0:
        blocks[:, block_write_idx] = prefix
    query = norm_weight.float() * qk_weight.float()
    out = torch.empty_like(prefix)
    rows = max(1, _TILE_BYTES // (4 * prefix.shape[1] * (2 * num_blocks + 4)))
    for start in range(0, prefix.shape[0], rows):
        tile = slice(start, start + rows)
        mixed = prefix[tile].float()
        if num_blocks > 0:
            sources = torch.cat([blocks[tile, :num_blocks].float(), mixed.unsqueeze(1)], 1)
            scale = torch.rsqrt(sources.square().mean(-1) + eps)
            weights = (torch.matmul(sources, query) * scale).softmax(-1)
            mixed = torch.bmm(weights.unsqueeze(1), sources).squeeze(1)
        if output_norm_weight is not None:
            mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + output_norm_eps)
            mixed = mixed * output_norm_weight.float()
        out[tile] = mixed.to(out.dtype)
    return out
