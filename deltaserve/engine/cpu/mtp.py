# SPDX-License-Identifier: Apache-2.0
"""K3's multi-token prediction head as vLLM's draft model on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import VllmConfig

from deltaserve.engine.cpu import vllm_internals as internals
from deltaserve.engine.cpu.model import keep_plain_weights


def mtp_input(
    positions: Tensor,
    inputs_embeds: Tensor,
    previous_hidden_states: Tensor,
    enorm_weight: Tensor,
    hnorm_weight: Tensor,
    eps: float,
) -> Tensor:
    """RMS-normalise the next token's embedding and the last hidden state side by side: [T, D], [T, D] -> [T, 2D].

    The embedding at position 0 counts as zero: nothing predicted that token.
    """
    size = (inputs_embeds.shape[1],)
    embeds = inputs_embeds.float().masked_fill((positions == 0).unsqueeze(1), 0.0)
    normed = [
        F.rms_norm(embeds, size, enorm_weight.float(), eps),
        F.rms_norm(previous_hidden_states.float(), size, hnorm_weight.float(), eps),
    ]
    return torch.cat(normed, 1).to(inputs_embeds.dtype)


internals.replace(internals.mtp, "fused_mtp_input", mtp_input)


class KimiK3MTP(internals.mtp.KimiK3MTP):
    """vLLM's MTP draft model on this package's kernels."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        keep_plain_weights(self)
