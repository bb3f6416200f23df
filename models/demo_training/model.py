# SPDX-License-Identifier: Apache-2.0
"""The K3-form text model with attention residuals, and its multi-token-prediction (MTP) head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.demo_training import ops
from models.demo_training.config import DemoConfig
from models.demo_training.damage import Damage
from models.demo_training.layers import (
    DeltaAttention,
    FeedForward,
    LatentAttention,
    MixtureOfExperts,
    Norm,
    linear,
)


class Layer(nn.Module):
    """One decoder layer: a sequence mixer and a feed-forward part, each behind an attention residual."""

    def __init__(self, config: DemoConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.is_kda = config.is_kda(index)
        self.self_attn: nn.Module = DeltaAttention(config) if self.is_kda else LatentAttention(config)
        self.is_moe = config.is_moe(index)
        if self.is_moe:
            self.block_sparse_moe = MixtureOfExperts(config)
        else:
            self.mlp = FeedForward(config, config.dense_size)
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        # Zero scores at the start: the residual begins as the plain mean of its sources.
        self.self_attention_res_norm, self.self_attention_res_proj = Norm(hidden, eps), linear(hidden, 1, 0.0)
        self.mlp_res_norm, self.mlp_res_proj = Norm(hidden, eps), linear(hidden, 1, 0.0)

    def feed_forward(self, x: Tensor) -> Tensor:
        """x [N, hidden] → [N, hidden]."""
        output: Tensor = self.block_sparse_moe(x) if self.is_moe else self.mlp(x)
        return output


class Body(nn.Module):
    """Everything that the checkpoint names `model.*`."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = Norm(hidden, eps)
        self.output_attn_res_norm, self.output_attn_res_proj = Norm(hidden, eps), linear(hidden, 1, 0.0)


class Output(NamedTuple):
    """logits [B, T, V]; hidden [B, T, C], before the last norm, is what the MTP head reads.

    `reads` holds what each layer's heads read from their state, [B·T, H, D].
    """

    logits: Tensor
    hidden: Tensor
    reads: tuple[Tensor, ...] = ()


class DemoModel(nn.Module):
    """The text model."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def mixtures(self) -> list[MixtureOfExperts]:
        """The mixture layers, for load balancing."""
        return [layer.block_sparse_moe for layer in self.layers() if layer.is_moe]

    def layers(self) -> list[Layer]:
        """The decoder layers, typed."""
        return [layer for layer in self.model.layers if isinstance(layer, Layer)]

    def forward(self, ids: Tensor, damage: Damage | None = None) -> Output:
        """ids [B, T] → logits and hidden states; `damage` says which memories are wrong."""
        batch, length = ids.shape
        body, eps = self.model, self.config.norm_eps
        act = torch.bfloat16 if torch.is_autocast_enabled(ids.device.type) else torch.float32

        def mix(sources: list[Tensor], norm: Norm, proj: nn.Linear, out_norm: Tensor | None) -> Tensor:
            score = norm.weight.float() * proj.weight.float().squeeze(0)
            return ops.residual_mix(sources, score, out_norm, eps).to(act)

        prefix: Tensor = body.embed_tokens(ids.reshape(-1))
        blocks: list[Tensor] = []
        delta: Tensor | None = None
        reads: list[Tensor] = []
        for i, layer in enumerate(self.layers()):
            if delta is not None:
                prefix = prefix + delta
            proj = layer.self_attention_res_proj
            x = mix([*blocks, prefix], layer.self_attention_res_norm, proj, layer.input_layernorm.weight)
            starts_block = i % self.config.residual_block == 0
            if starts_block:
                blocks.append(prefix)
            wrong = None
            if damage is not None:
                wrong = (damage.kda if layer.is_kda else damage.mla).get(i)
            y, read = layer.self_attn(x, batch, length, damage, wrong)
            reads.append(read)
            prefix = y.float() if starts_block else prefix + y
            out_norm = layer.post_attention_layernorm.weight
            x = mix([*blocks, prefix], layer.mlp_res_norm, layer.mlp_res_proj, out_norm)
            delta = layer.feed_forward(x)
        assert delta is not None
        hidden = mix([*blocks, prefix + delta], body.output_attn_res_norm, body.output_attn_res_proj, None)
        logits: Tensor = self.lm_head(body.norm(hidden))
        return Output(logits.view(batch, length, -1), hidden.view(batch, length, -1), tuple(reads))


class SharedHead(nn.Module):
    """The norm before the draft's logits; the projection itself is the text model's."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, config.norm_eps)


class MtpHead(nn.Module):
    """K3's MTP layer: from the state at token i and token i+1 it predicts token i+2.

    A plain pre-norm block (no attention residual) with MLA, on a projection of the normalised token embedding
    and the normalised hidden state. The embedding of the token after position 0 counts as zero, as in vLLM.
    """

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.enorm, self.hnorm = Norm(hidden, eps), Norm(hidden, eps)
        self.eh_proj = linear(2 * hidden, hidden)
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.self_attn = LatentAttention(config)
        self.mlp = FeedForward(config, config.dense_size)
        self.shared_head = SharedHead(config)

    def forward(self, text: DemoModel, ids: Tensor, hidden: Tensor) -> Output:
        """ids [B, T], hidden [B, T, C] of the text model → logits [B, T−1, V] for token i+2, and the new hidden."""
        batch, length = ids.shape[0], ids.shape[1] - 1
        embedded = text.model.embed_tokens(ids[:, 1:]).detach()
        embedded = embedded * (torch.arange(length, device=ids.device) > 0)[:, None]
        act = torch.bfloat16 if torch.is_autocast_enabled(ids.device.type) else torch.float32
        e = self.enorm(embedded.reshape(batch * length, -1).to(act))
        h = self.hnorm(hidden[:, :-1].detach().reshape(batch * length, -1).to(act))
        residual = self.eh_proj(torch.cat([e, h], -1))
        residual = residual + self.self_attn(self.input_layernorm(residual), batch, length, None, None)[0]
        residual = residual + self.mlp(self.post_attention_layernorm(residual))
        logits = nn.functional.linear(self.shared_head.norm(residual), text.lm_head.weight.detach())
        return Output(logits.view(batch, length, -1), residual.view(batch, length, -1))
