# SPDX-License-Identifier: Apache-2.0
"""The model's layers, with parameters named as vLLM loads them.

Tensors are flat over tokens, [B·T, C], except inside the sequence mixers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.demo_training import kda, ops
from models.demo_training.config import DemoConfig
from models.demo_training.damage import Damage, damaged


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [N, size] → [N, size]."""
        return ops.rms_norm(x, self.weight, self.eps)


class Weight(nn.Module):
    """A parameter that the checkpoint names `<module>.weight`."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


def linear(size_in: int, size_out: int, std: float | None = None) -> nn.Linear:
    """A projection without bias, normal with deviation `std` (1/√size_in by default)."""
    layer = nn.Linear(size_in, size_out, bias=False)
    nn.init.normal_(layer.weight, std=size_in**-0.5 if std is None else std)
    return layer


class DeltaAttention(nn.Module):
    """KDA: projections, short convolution, recurrence, gated norm."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        hidden, self.heads, self.dim = config.hidden_size, config.heads, config.kda_head_dim
        self.lower_bound, self.eps = config.gate_lower_bound, config.norm_eps
        width = self.heads * self.dim
        self.q_proj, self.k_proj = linear(hidden, width), linear(hidden, width)
        self.v_proj, self.g_proj = linear(hidden, width), linear(hidden, width)
        newest = torch.zeros(config.conv_size)
        newest[-1] = 0.7  # start near the identity: the convolution first passes the current token
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            Weight(torch.randn(width, 1, config.conv_size) * 0.15 + newest) for _ in range(3)
        )
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        # σ of −9 to −2 times the bound: memories of 10 to 1,600 tokens at the start
        self.dt_bias = nn.Parameter(torch.empty(width).uniform_(-9.0, -2.0))
        self.f_a_proj = linear(hidden, self.dim)
        self.f_b_proj = linear(self.dim, width, 0.5 * self.dim**-0.5)
        self.b_proj = linear(hidden, self.heads)
        self.o_norm = Norm(self.dim, config.norm_eps)
        self.o_proj = linear(width, hidden, 0.5 * width**-0.5)

    def mix(self, streams: Sequence[Tensor]) -> Tensor:
        """raw q|k|v [B, T, 3, H, D], gate [B, T, H, D], beta [B, T, H, 1] → [B, T, H, D] from an empty state."""
        raw, gate, beta = streams
        batch, length = raw.shape[:2]
        convs = (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)
        weight = torch.cat(convs).squeeze(1).float()
        position = torch.arange(length, device=raw.device).repeat(batch).unsqueeze(1)
        qkv = ops.short_conv(raw.reshape(batch * length, -1), weight, position)
        q, k, v = (t.contiguous() for t in qkv.view(batch, length, 3, self.heads, self.dim).unbind(2))
        streams_in = kda.Streams(q, k, v, gate.contiguous(), beta.squeeze(-1).contiguous())
        return kda.attention(streams_in, self.A_log, self.dt_bias, self.lower_bound)

    def forward(
        self, x: Tensor, batch: int, length: int, damage: Damage | None, wrong: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [B·T, hidden] → [B·T, hidden], and what each head read [B·T, H, D].

        `wrong` [B, H] marks the heads of rows whose memory `damage` damages.
        """
        weights = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        raw = F.linear(x, weights).view(batch, length, 3, self.heads, self.dim)
        gate = self.f_b_proj(self.f_a_proj(x)).view(batch, length, self.heads, self.dim)
        beta = self.b_proj(x).view(batch, length, self.heads, 1)
        streams = (raw, gate, beta)
        if damage is None or wrong is None:
            output = self.mix(streams)
        else:
            output = damaged(self.mix, streams, damage, wrong)
        flat = output.reshape(batch * length, self.heads, self.dim)
        normed = ops.gated_norm(flat, self.o_norm.weight, self.g_proj(x).view_as(flat), self.eps)
        return self.o_proj(normed.reshape(batch * length, -1)), normed


class LatentAttention(nn.Module):
    """MLA without position encoding, with q-LoRA and an output gate (uncompressed form for training)."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        hidden, self.heads = config.hidden_size, config.heads
        self.nope, self.rope, self.value = config.nope_dim, config.rope_dim, config.value_dim
        self.latent = config.kv_lora_rank
        self.q_a_proj = linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = Norm(config.q_lora_rank, config.norm_eps)
        self.q_b_proj = linear(config.q_lora_rank, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(hidden, self.latent + self.rope)
        self.kv_a_layernorm = Norm(self.latent, config.norm_eps)
        self.kv_b_proj = linear(self.latent, self.heads * (self.nope + self.value))
        self.g_proj = linear(hidden, self.heads * self.value)
        self.o_proj = linear(self.heads * self.value, hidden)

    def mix(self, streams: Sequence[Tensor]) -> Tensor:
        """q, k [B, T, H, nope+rope], v [B, T, H, value] → [B, T, H, value], causal."""
        q, k, v = (t.transpose(1, 2) for t in streams)
        width = self.nope + self.rope
        padded = F.pad(v, (0, width - self.value))  # equal widths, so that the flash kernel serves
        output = F.scaled_dot_product_attention(q, k, padded, is_causal=True, scale=width**-0.5)
        return output[..., : self.value].transpose(1, 2)

    def forward(
        self, x: Tensor, batch: int, length: int, damage: Damage | None, wrong: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [B·T, hidden] → [B·T, hidden], and what each head read [B·T, H, value].

        `wrong` [B] marks the rows whose cache `damage` damages.
        """
        width = self.nope + self.rope
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, self.heads, width)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.heads, -1)
        k_own, v = expanded.split([self.nope, self.value], -1)
        k_shared = shared.view(batch, length, 1, self.rope).expand(-1, -1, self.heads, -1)
        streams = (q, torch.cat([k_own, k_shared], -1), v)
        if damage is None or wrong is None:
            output = self.mix(streams)
        else:
            output = damaged(self.mix, streams, damage, wrong)
        gated = output.reshape(batch * length, -1) * self.g_proj(x).sigmoid()
        return self.o_proj(gated), gated.view(batch * length, self.heads, self.value)


class FeedForward(nn.Module):
    """Dense feed-forward layer with SiTU."""

    def __init__(self, config: DemoConfig, size: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.gate_proj, self.up_proj = linear(hidden, size), linear(hidden, size)
        self.down_proj = linear(size, hidden)
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta

    def forward(self, x: Tensor) -> Tensor:
        """x [N, hidden] → [N, hidden]."""
        both = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight]))
        projected: Tensor = self.down_proj(ops.situ(both, self.beta, self.linear_beta))
        return projected


class Gate(nn.Module):
    """The router's scores; the correction bias balances the load and never receives a gradient."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts), requires_grad=False)


class MixtureOfExperts(nn.Module):
    """K3's latent mixture: routed experts on a narrow projection, one shared expert on the full width.

    Training computes every expert for every token and weighs the results, which is exact and fast at this size.
    """

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        hidden, self.experts, self.top = config.hidden_size, config.experts, config.experts_per_token
        self.size, self.latent = config.expert_size, config.latent_size
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.gate = Gate(hidden, self.experts)
        shape = (self.experts, self.size, self.latent)
        self.w1 = nn.Parameter(torch.randn(shape) * self.latent**-0.5)
        self.w3 = nn.Parameter(torch.randn(shape) * self.latent**-0.5)
        self.w2 = nn.Parameter(torch.randn(self.experts, self.latent, self.size) * self.size**-0.5)
        self.shared_experts = FeedForward(config, self.size)
        self.routed_expert_down_proj = linear(hidden, self.latent)
        self.routed_expert_norm = Norm(self.latent, config.norm_eps)
        self.routed_expert_up_proj = linear(self.latent, hidden)
        self.load = torch.zeros(self.experts)
        """Share of tokens that chose each expert in the last training pass."""

    def route(self, x: Tensor) -> Tensor:
        """Weights [N, experts], zero for experts not chosen; scores in float32 as vLLM computes them."""
        with torch.autocast(x.device.type, enabled=False):
            scores = (x.float() @ self.gate.weight.float().t()).sigmoid()
        chosen = (scores.detach() + self.gate.e_score_correction_bias).topk(self.top, -1).indices
        picked = scores.gather(1, chosen)
        return torch.zeros_like(scores).scatter(1, chosen, picked / picked.sum(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, hidden] → [N, hidden]."""
        weights = self.route(x)
        if self.training:
            self.load = (weights > 0).float().mean(0).detach()
        z = self.routed_expert_down_proj(x)
        stacked = torch.cat([self.w1, self.w3], 1).reshape(-1, self.latent)
        inner = ops.situ(
            F.linear(z, stacked).view(-1, self.experts, 2 * self.size), self.beta, self.linear_beta
        )
        inner = (inner * weights.unsqueeze(-1).to(inner.dtype)).reshape(-1, self.experts * self.size)
        routed = F.linear(inner, self.w2.permute(1, 0, 2).reshape(self.latent, -1))
        output: Tensor = self.shared_experts(x) + self.routed_expert_up_proj(self.routed_expert_norm(routed))
        return output
