# SPDX-License-Identifier: Apache-2.0
"""A prompt over an fp8 cache whose query stays wide: what is called, and what the layer's own method keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltaserve.engine.cpu.vllm_version import UnsupportedVllmError
from deltaserve.engine.cuda import fp8_cache

HEADS, NOPE, ROPE, WIDTH, RANK, TOKENS = 3, 8, 4, 6, 16, 5
FP8 = torch.float8_e4m3fn


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[Any, Any]:
    """[T, H, width] and its log-sum-exp [H, T]."""
    scores = torch.einsum("thd,shd->hts", q, k)
    if causal:
        scores = scores.masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


class Layer:
    """Numbers of a layer, with the parts of vLLM's that the mend calls."""

    def __init__(self, dtype: str, context: int) -> None:
        torch.manual_seed(1)
        self.kv_cache_dtype, self.num_local_heads, self.v_head_dim = dtype, HEADS, WIDTH
        self.qk_nope_head_dim, self.dcp_world_size, self._k_scale = NOPE, 1, torch.tensor(0.5)
        self.up = torch.randn(RANK, HEADS * (NOPE + WIDTH)) / 4
        self.kv_cache = torch.zeros(4, 4, RANK + ROPE, dtype=torch.uint8)
        self.history = torch.randn(context, RANK), torch.randn(context, ROPE)
        self.kept: list[Any] = []

    def kv_b_proj(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rows @ self.up, None

    def keys(self, rows: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (rows @ self.up).view(-1, HEADS, NOPE + WIDTH).split([NOPE, WIDTH], -1)
        return torch.cat([k, rope[:, None].expand(-1, HEADS, -1)], -1), v

    def _compute_prefill_context(self, q: torch.Tensor, metadata: Any) -> tuple[Any, Any]:
        return attention(q, *self.keys(*self.history), causal=False)


def a_module(layer: Layer) -> Any:
    def store(
        rows: Any, rope: Any, cache: torch.Tensor, slots: torch.Tensor, dtype: str, scale: torch.Tensor
    ) -> None:
        assert dtype == "fp8"
        assert rope.shape == (TOKENS, ROPE)
        cache.view(-1, RANK + ROPE)[slots] = (torch.cat([rows, rope], -1) / scale).to(FP8).view(torch.uint8)

    def merge(output: Any, prefix_output: Any, prefix_lse: Any, suffix_output: Any, suffix_lse: Any) -> None:
        share = torch.sigmoid(prefix_lse - suffix_lse).T[..., None]
        output.copy_(prefix_output * share + suffix_output * (1 - share))

    def concat(k: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        return torch.cat([k, rope.reshape(len(k), 1, ROPE).expand(-1, HEADS, -1)], -1)

    return SimpleNamespace(
        current_platform=SimpleNamespace(fp8_dtype=lambda: FP8),
        ops=SimpleNamespace(concat_and_cache_mla=store),
        fused_mla_kv_concat=concat,
        merge_attn_states=merge,
    )


def run(layer: Layer, q_dtype: torch.dtype, context: bool, positions: Any = None) -> tuple[Any, ...]:
    def new_tokens(q: Any, k: Any, v: Any, return_softmax_lse: bool, out: Any) -> Any:
        found = attention(q, k, v, causal=True)
        return found if return_softmax_lse else found[0]

    metadata = SimpleNamespace(
        prefill=SimpleNamespace(
            q_data_type=q_dtype,
            chunked_context=object() if context else None,
            prefill_backend=SimpleNamespace(run_prefill_new_tokens=new_tokens),
        )
    )
    q, rows = torch.randn(TOKENS, HEADS, NOPE + ROPE), torch.randn(TOKENS, RANK)
    rope, out = torch.randn(TOKENS, 1, ROPE), torch.empty(TOKENS, HEADS * WIDTH)
    slots = torch.tensor([9, 2, 3, 14, 0])
    forward = fp8_cache.mended(lambda *given: layer.kept.append(given), a_module(layer))
    forward(layer, q, rows, rope, positions, None, slots, metadata, out)
    return q, rows, rope.reshape(TOKENS, ROPE), slots, out


@pytest.mark.parametrize("context", [0, 7])
def test_answer_and_rows_are_those_of_plain_attention(context: int) -> None:
    layer = Layer("fp8", context)
    q, rows, rope, slots, out = run(layer, torch.bfloat16, bool(context))
    k, v = layer.keys(torch.cat([layer.history[0], rows]), torch.cat([layer.history[1], rope]))
    scores = torch.einsum("thd,shd->hts", q, k)
    scores = scores.masked_fill(torch.ones(TOKENS, context + TOKENS).triu(1 + context).bool(), float("-inf"))
    wanted = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
    torch.testing.assert_close(out.view(TOKENS, HEADS, WIDTH), wanted)
    assert not layer.kept, "the layer's own method would end in its assertion"
    stored = layer.kv_cache.view(-1, RANK + ROPE)
    expected = (torch.cat([rows, rope], -1) / 0.5).to(FP8)
    assert torch.equal(stored[slots].view(FP8).float(), expected.float())
    others = [slot for slot in range(16) if slot not in slots.tolist()]
    assert not stored[others].any(), "no other slot is touched"


@pytest.mark.parametrize(
    ("dtype", "q_dtype"), [("auto", torch.bfloat16), ("fp8", FP8), ("fp8_ds_mla", torch.bfloat16)]
)
def test_everything_else_is_the_layers_own(dtype: str, q_dtype: torch.dtype) -> None:
    layer = Layer(dtype, 0)
    run(layer, q_dtype, False)
    assert len(layer.kept) == 1
    assert not layer.kv_cache.any()


def test_positions_are_refused() -> None:
    with pytest.raises(UnsupportedVllmError, match="kv_cache_dtype"):
        run(Layer("fp8", 0), torch.bfloat16, False, positions=torch.arange(TOKENS))


def test_nothing_is_exchanged_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fp8_cache.VARIABLE, raising=False)
    assert not fp8_cache.install()
    monkeypatch.setenv(fp8_cache.VARIABLE, "0")
    assert not fp8_cache.install()
