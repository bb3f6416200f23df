# SPDX-License-Identifier: Apache-2.0
"""KDA kernels against the float64 recurrence: K != V, start states that are neither zero nor symmetric, both gates."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deltaserve.engine.cpu import kda
from tests.unit.reference import kda as reference

HEADS, KEY, VALUE = 3, 32, 48
LENGTHS = (1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 300)
GATES = {"k3": -5.0, "kimi-linear": None}
TOLERANCE = 1e-5


@dataclass
class Inputs:
    """Packed inputs of sequences of ``lengths`` tokens."""

    lengths: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    raw_g: Tensor
    raw_beta: Tensor
    a_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    state: Tensor

    @property
    def cu(self) -> list[int]:
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()]

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.cu))

    def expected(self, n: int, rows: slice | None = None, **changed: object) -> tuple[Tensor, Tensor]:
        rows = rows or slice(self.cu[n], self.cu[n + 1])
        given = {
            "a_log": self.a_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.lower_bound,
            "state": self.state[n],
        }
        return reference.kda(
            self.q[rows],
            self.k[rows],
            self.v[rows],
            self.raw_g[rows],
            self.raw_beta[rows],
            **(given | changed),
        )

    @property
    def gate(self) -> dict[str, object]:
        return {"a_log": self.a_log, "dt_bias": self.dt_bias, "lower_bound": self.lower_bound}

    def chunked(self, **options: int) -> tuple[Tensor, Tensor]:
        state, out = self.state.clone(), torch.full_like(self.v, float("nan"))
        kda.chunk_kda(
            self.q,
            self.k,
            self.v,
            self.raw_g,
            self.raw_beta,
            **self.gate,
            spans=self.spans,
            state=state,
            out=out,
            **options,
        )
        return out, state

    @property
    def qkv(self) -> Tensor:
        return torch.cat([x.flatten(1) for x in (self.q, self.k, self.v)], 1)


def make(lengths: tuple[int, ...], gate: str, key: int = KEY, value: int = VALUE) -> Inputs:
    t = sum(lengths)
    return Inputs(
        lengths,
        torch.randn(t, HEADS, key),
        torch.randn(t, HEADS, key),
        torch.randn(t, HEADS, value),
        torch.randn(t, HEADS, key),
        torch.randn(t, HEADS),
        torch.randn(HEADS) * 0.3,
        torch.randn(HEADS * key) - 3.0,
        GATES[gate],
        torch.randn(len(lengths), HEADS, value, key),
    )


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("tile_bytes", [1 << 18, kda.TILE_BYTES])
def test_chunk_form_equals_the_recurrence(gate: str, tile_bytes: int) -> None:
    x = make(LENGTHS, gate)
    out, state = x.chunked(tile_bytes=tile_bytes)
    for n, length in enumerate(x.lengths):
        o, states = x.expected(n)
        assert error(out[x.cu[n] : x.cu[n + 1]], o) < TOLERANCE, f"outputs of {length} tokens"
        assert error(state[n], states[-1]) < TOLERANCE, f"state after {length} tokens"


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("chunk", [2, 4, 16, 128])
def test_any_chunk_length_gives_the_same(gate: str, chunk: int) -> None:
    x = make((37, 130), gate)
    out, state = x.chunked(max_chunk=chunk)
    for n in range(2):
        o, states = x.expected(n)
        assert error(out[x.cu[n] : x.cu[n + 1]], o) < TOLERANCE
        assert error(state[n], states[-1]) < TOLERANCE


@pytest.mark.parametrize("gate", GATES)
def test_wrong_mathematics_is_seen(gate: str) -> None:
    """The comparison fails for a transposed state, another gate, a mean in place of the sum, and no decay."""
    x = make((17,), gate, key=32, value=32)
    out, state = x.chunked()
    wrong_gate = None if gate == "k3" else -5.0
    for changed in (
        {"state": x.state[0].transpose(-1, -2)},
        {"state": torch.zeros_like(x.state[0])},
        {"lower_bound": wrong_gate},
        {"dt_bias": None},
    ):
        o, states = x.expected(0, **changed)
        assert error(out, o) > 100 * TOLERANCE, changed.keys()
        if "state" not in changed:
            assert error(state[0], states[-1]) > 100 * TOLERANCE


@pytest.mark.parametrize("gate", GATES)
def test_strong_decay_for_a_whole_chunk_stays_finite(gate: str) -> None:
    """raw_g = +30 for 64 tokens: e^(-G) would be e^320 (K3) or e^1920 (softplus)."""
    x = make((200,), gate)
    x.raw_g[40:104] = 30.0
    out, state = x.chunked()
    o, states = x.expected(0)
    assert bool(out.isfinite().all())
    assert error(out, o) < TOLERANCE
    assert error(state[0], states[-1]) < TOLERANCE
    # What the shortcut with e^(-G) does there, to show that the case is not harmless:
    g = kda.log_decay(x.raw_g, x.a_log, x.dt_bias, x.lower_bound)[40:104].cumsum(0)
    assert not bool(torch.exp(-g).isfinite().all())


def test_nearly_no_decay_keeps_old_tokens_exact() -> None:
    """Decays near one, where differences of large sums would lose digits after a strong stretch."""
    x = make((192,), "kimi-linear")
    x.raw_g[:] = -8.0
    x.raw_g[64:72] = 12.0
    out, state = x.chunked()
    o, states = x.expected(0)
    assert error(out, o) < TOLERANCE
    assert error(state[0], states[-1]) < TOLERANCE


@pytest.mark.parametrize("gate", GATES)
def test_repeated_keys_do_not_blow_up_the_inverse(gate: str) -> None:
    """One key 128 times with beta near one: powers of A would grow as binomials, the halves do not."""
    x = make((128,), gate)
    x.k[:] = x.k[:1]
    x.raw_beta[:] = 8.0
    x.raw_g[:] = -20.0
    out, state = x.chunked()
    o, states = x.expected(0)
    assert error(out, o) < TOLERANCE
    assert error(state[0], states[-1]) < TOLERANCE


def test_cut_anywhere_prefill_continues_from_its_state() -> None:
    x = make((300,), "k3")
    whole, state = x.chunked()
    for cut in (1, 5, 16, 63, 64, 200, 299):
        s, out = x.state.clone(), torch.empty_like(x.v)
        for rows in (slice(0, cut), slice(cut, 300)):
            part = [t[rows] for t in (x.q, x.k, x.v, x.raw_g, x.raw_beta)]
            spans = [(0, rows.stop - rows.start)]
            kda.chunk_kda(*part, **x.gate, spans=spans, state=s, out=out[rows])
        assert error(out, whole.double()) < 2e-6, cut
        assert error(s, state.double()) < 2e-6, cut


def test_a_batch_does_not_change_a_sequence() -> None:
    x = make((7, 150, 64, 0, 33), "k3")
    out, state = x.chunked()
    for n, length in enumerate(x.lengths):
        rows = slice(x.cu[n], x.cu[n + 1])
        s, alone = x.state[n : n + 1].clone(), torch.empty_like(x.v[rows])
        part = [t[rows] for t in (x.q, x.k, x.v, x.raw_g, x.raw_beta)]
        kda.chunk_kda(*part, **x.gate, spans=[(0, length)], state=s, out=alone)
        torch.testing.assert_close(out[rows], alone, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(state[n], s[0], rtol=2e-5, atol=2e-6)
    assert torch.equal(state[3], x.state[3]), "a sequence without tokens keeps its state"


@pytest.mark.parametrize("gate", GATES)
def test_decode_steps_equal_the_recurrence_and_leave_padding_alone(gate: str) -> None:
    steps, requests = 5, 3
    x = make((steps,) * requests, gate)
    cache = torch.full((9, HEADS, VALUE, KEY), float("nan"))
    slots = torch.tensor([4, 0, 7, 2], dtype=torch.int32)
    real = [0, 2, 3]
    for n, row in enumerate(real):
        cache[slots[row]] = x.state[n]
    for t in range(steps):
        rows = torch.tensor([x.cu[0] + t, 0, x.cu[1] + t, x.cu[2] + t])
        out = kda.decode_kda(
            x.qkv[rows], x.raw_g[rows], x.raw_beta[rows], **x.gate, state_cache=cache, slots=slots
        )
        assert torch.equal(out[1], torch.zeros_like(out[1]))
        for n, row in enumerate(real):
            o, states = x.expected(n)
            assert error(out[row], o[t]) < TOLERANCE
            assert error(cache[slots[row]], states[t]) < TOLERANCE
    untouched = [s for s in range(9) if s not in slots[real].tolist()]
    assert bool(cache[untouched].isnan().all()), "slots of nobody, the null slot among them, were not written"
    assert error(cache[4].transpose(-1, -2).reshape(-1), x.expected(0)[1][-1].reshape(-1)) > 0.1


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_speculative_window_starts_after_the_accepted_tokens(gate: str, accepted: int) -> None:
    """One state a token; the next window starts from the state after the last accepted one, rejected drafts or none."""
    window, requests = 4, 2
    x = make((2 * window, 2 * window), gate)
    cache = torch.full((20, HEADS, VALUE, KEY), float("nan"))
    slots = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]])
    cache[1], cache[9] = x.state
    cu = [0, window, 2 * window]

    def step(offset: int, num_accepted: Tensor | None) -> Tensor:
        rows = torch.cat([torch.arange(window) + x.cu[n] + offset for n in range(requests)])
        return kda.speculative_kda(
            x.qkv[rows],
            x.raw_g[rows],
            x.raw_beta[rows],
            **x.gate,
            state_cache=cache,
            slots=slots,
            num_accepted=num_accepted,
            cu_seqlens=cu,
        )

    first = step(0, None)
    for n in range(requests):
        o, states = x.expected(n, slice(x.cu[n], x.cu[n] + window))
        assert error(first[n * window : (n + 1) * window], o) < TOLERANCE
        for t in range(window):
            assert error(cache[slots[n, t]], states[t]) < TOLERANCE
    kept = cache.clone()
    second = step(accepted, torch.tensor([accepted] * requests))
    for n in range(requests):
        rows = slice(x.cu[n] + accepted, x.cu[n] + accepted + window)
        o, states = x.expected(n, rows, state=kept[slots[n, accepted - 1]])
        assert error(second[n * window : (n + 1) * window], o) < TOLERANCE
        assert error(cache[slots[n, -1]], states[-1]) < TOLERANCE
        wrong, _ = x.expected(n, rows, state=kept[slots[n, accepted % window]])
        assert error(second[n * window : (n + 1) * window], wrong) > 100 * TOLERANCE


def test_speculative_padding_and_short_windows() -> None:
    x = make((2, 4, 4), "k3")
    cache = torch.full((20, HEADS, VALUE, KEY), float("nan"))
    slots = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0], [9, 8, 7, 6]])
    cache[1], cache[9] = x.state[0], x.state[2]
    out = kda.speculative_kda(
        x.qkv,
        x.raw_g,
        x.raw_beta,
        **x.gate,
        state_cache=cache,
        slots=slots,
        num_accepted=None,
        cu_seqlens=x.cu,
    )
    for n in (0, 2):
        o, states = x.expected(n)
        assert error(out[x.cu[n] : x.cu[n + 1]], o) < TOLERANCE
        assert error(cache[slots[n, x.lengths[n] - 1]], states[-1]) < TOLERANCE
    assert torch.equal(out[2:6], torch.zeros_like(out[2:6]))
    assert bool(cache[[0, 3, 4, 5]].isnan().all())


@pytest.mark.parametrize("gate", GATES)
def test_gate_values(gate: str) -> None:
    raw = torch.linspace(-40.0, 40.0, HEADS * KEY * 4).view(4, HEADS, KEY)
    a_log, bias = torch.tensor([-1.0, 0.0, 1.0]), torch.randn(HEADS * KEY)
    g = kda.log_decay(raw, a_log, bias, GATES[gate])
    assert error(g, reference.log_decay(raw, a_log, bias, GATES[gate])) < 1e-6
    assert bool((g <= 0).all())
    assert error(g, reference.log_decay(raw, -a_log, bias, GATES[gate])) > 1e-3
