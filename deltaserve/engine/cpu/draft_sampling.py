# SPDX-License-Identifier: Apache-2.0
"""What the rejection sampler of drafts needs on a CPU and vLLM 0.32 gets wrong there.

Every request of a batch has its own temperature, top-k and top-p; the sampler wants them a drafted token. vLLM's CPU
form of that kernel casts its *output* to int64 and writes into the cast copy, so that the caller divides logits by what
the allocator had left: as soon as one request of a batch is sampled, greedy ones beside it get other tokens than
without drafts. All other kernels of the draft path copy their results back; a test compares each with its definition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def expand(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write each request's value [B] once a token into ``output`` [T], in its dtype; vLLM's signature.

    ``cu_num_tokens`` [B] is the inclusive running sum of the tokens. ``replace_from`` becomes ``replace_to``: a greedy
    request's temperature 0 is no divisor.
    """
    lengths = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.long))
    values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
    output[: int(lengths.sum())] = torch.repeat_interleave(values, lengths)


OVERRIDES: dict[str, Any] = {"vllm.v1.sample.rejection_sampler.expand_kernel": expand}
"""vLLM's kernel names and what stands in for them."""
