# SPDX-License-Identifier: Apache-2.0
"""The seam into vLLM's Kimi K3 layers: what it refuses, what it exchanges, and what it leaves alone when it is off."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deltaserve.engine.cpu.vllm_version import UnsupportedVllmError
from deltaserve.engine.cuda import replay_ssm
from deltaserve.engine.cuda.replay_ssm import ReplayUnsupportedError, Targets

HEADS, DIM, WINDOW = 2, 128, 4


class Group:
    """Stands for EngineRecords."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def plan(self, idx_mapping: Any, slots: Any, starts: Any, **options: Any) -> None:
        self.calls.append(("plan", idx_mapping, slots, starts, options))

    def advance(self, *arguments: Any) -> None:
        self.calls.append(("advance", *arguments))

    def forget(self, request: int) -> None:
        self.calls.append(("forget", request))


def doubles() -> Targets:
    """Classes with the methods of vLLM 0.33.0 that are exchanged."""

    class Layer:
        use_recoverssm = True
        head_dim, conv_size, spec_query_len, local_num_heads = DIM, 4, WINDOW, HEADS
        recoverssm_backend = "triton"
        prefix = "layers.0"

        def __init__(self, config: Any, vllm_config: Any, prefix: str = "", aux_stream: Any = None) -> None:
            for name, value in config.items():
                setattr(self, name, value)
            self.conv1d = SimpleNamespace(bias=None)

        def get_state_dtype(self) -> tuple[torch.dtype, ...]:
            return (torch.bfloat16, getattr(self, "state_dtype", torch.float32))

        def _recoverssm_verify(
            self,
            m: Any,
            mixed_qkv: Any,
            raw_g: Any,
            raw_beta: Any,
            conv_weight: Any,
            query_start_loc: Any,
            out: Any,
        ) -> Any:
            return "vLLM's"

    class Builder:
        recoverssm_context: Any = None

        def _get_recoverssm_context(self) -> Any:
            return "vLLM's"

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: Any,
            num_accepted_tokens: Any = None,
            num_decode_draft_tokens_cpu: Any = None,
            fast_build: bool = False,
        ) -> Any:
            commit = common_attn_metadata
            context = self._get_recoverssm_context() if commit is not None else None
            return SimpleNamespace(recoverssm_commit=commit, recoverssm_context=context, num_spec_decodes=3)

    class Records:
        @classmethod
        def allocate(
            cls,
            max_num_reqs: int,
            num_heads: int,
            spec_query_len: int,
            head_dim: int,
            dtype: Any,
            device: Any,
        ) -> Any:
            return (cls, max_num_reqs, num_heads, spec_query_len, head_dim, dtype, device)

    class ModelState:
        def prepare_attn(self, input_batch: Any, cudagraph_mode: Any) -> Any:
            return ("prepared", cudagraph_mode)

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            self.added = req_index

    return Targets("0.33.0", Layer, Builder, Records, ModelState)


def config(**changes: Any) -> Any:
    values = {
        "model_config": SimpleNamespace(dtype=torch.bfloat16),
        "speculative_config": SimpleNamespace(enable_adaptive_verification=False),
        "use_v2_model_runner": True,
    }
    return SimpleNamespace(**(values | changes))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(replay_ssm.VARIABLE, "1")


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = doubles()
    before = {
        kind: dict(vars(getattr(targets, kind))) for kind in ("layer", "builder", "records", "model_state")
    }
    for value in (None, "", "0"):
        if value is None:
            monkeypatch.delenv(replay_ssm.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(replay_ssm.VARIABLE, value)
        assert not replay_ssm.install(targets)
    assert before == {kind: dict(vars(getattr(targets, kind))) for kind in before}
    monkeypatch.setenv(replay_ssm.VARIABLE, "yes")
    with pytest.raises(ValueError, match="DELTASERVE_REPLAY_SSM='yes'"):
        replay_ssm.install(targets)


@pytest.mark.usefixtures("chosen")
def test_another_vllm_is_refused_before_anything_is_exchanged() -> None:
    targets = doubles()
    verify = targets.layer._recoverssm_verify
    for version in ("0.32.0", "0.33.1", "0.34.0+cu130"):
        with pytest.raises(
            UnsupportedVllmError, match=f"vLLM {version.replace('+', '.')}.*install that, or unset"
        ):
            replay_ssm.install(replace(targets, version=version))

    def build(self: Any, common_attn_metadata: Any) -> None: ...

    targets.builder.build = build
    with pytest.raises(UnsupportedVllmError, match=r"Builder\.build takes"):
        replay_ssm.install(targets)
    del targets.model_state.add_request
    targets.builder.build = doubles().builder.build
    with pytest.raises(UnsupportedVllmError, match=r"ModelState.add_request takes \(\)"):
        replay_ssm.install(targets)
    assert targets.layer._recoverssm_verify is verify
    assert replay_ssm.install(doubles()), "the control"


def test_the_ring_has_longer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(replay_ssm.VARIABLE, "ring")
    targets = doubles()
    assert replay_ssm.install(targets)
    assert replay_ssm.flush_at() == 16
    assert targets.records.allocate(8, HEADS, WINDOW, DIM, "bf16", "cuda")[1:4] == (16, HEADS, WINDOW + 15)
    monkeypatch.setenv(replay_ssm.VARIABLE, "1")
    assert replay_ssm.flush_at() == 1, "the control"
    assert targets.records.allocate(8, HEADS, WINDOW, DIM, "bf16", "cuda")[1:4] == (16, HEADS, WINDOW)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(("version", "words"), [("0.32.0", "another version"), ("0.33.0", "not a package")])
def test_a_vllm_without_such_layers_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, words: str
) -> None:
    vllm = ModuleType("vllm")
    vllm.__version__ = version  # type: ignore[attr-defined]
    for name in [n for n in sys.modules if n.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(UnsupportedVllmError, match=rf"{words}.*was written for vLLM 0\.33\.0"):
        replay_ssm.install()


@pytest.mark.usefixtures("chosen")
def test_a_step_from_the_batch_to_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = doubles()
    assert replay_ssm.install(targets)
    assert replay_ssm.install(targets), "twice is once"
    group = Group()
    monkeypatch.setattr(replay_ssm, "make_group", lambda builder: group)
    assert targets.records.allocate(8, HEADS, WINDOW, DIM, "bf16", "cuda")[1:] == (
        16, HEADS, WINDOW, DIM, "bf16", "cuda",
    )  # fmt: skip

    state, builder = targets.model_state(), targets.builder()
    commit = SimpleNamespace(state_indices="slots", query_start_loc="starts", request_indices="rows")
    for tails, expected in (
        (None, False),
        (np.array([False, False]), False),
        (np.array([False, True]), True),
    ):
        batch = SimpleNamespace(idx_mapping=object(), prefill_runs_as_decode_np=tails)
        assert state.prepare_attn(batch, "full") == ("prepared", "full")
        metadata = builder.build(0, commit)
        assert metadata.recoverssm_context is group
        options = {"windows": 3, "request_indices": "rows", "flush_now": expected}
        assert group.calls == [("plan", batch.idx_mapping, "slots", "starts", options)]
        group.calls.clear()
    assert builder.build(0, None).recoverssm_context is None
    assert group.calls == [], "a step without windows plans none"

    state.add_request(5, None)
    assert state.added == 5
    assert group.calls == [("forget", 5)]
    group.calls.clear()

    layer = targets.layer({}, config())
    x = torch.zeros(6, 3 * HEADS * DIM)
    out = layer._recoverssm_verify(metadata, x, "g", "beta", "weight", "starts", None)
    assert out.shape == (1, 6, HEADS, DIM)
    assert group.calls[0][:2] == ("advance", "layers.0")
    assert group.calls[0][2] is x
    assert group.calls[0][3:5] == ("g", "beta")
    assert group.calls[0][5] is out
    assert group.calls[0][6] == 3
    given = torch.zeros(1, 6, HEADS, DIM)
    assert layer._recoverssm_verify(metadata, x, "g", "beta", "weight", "starts", given) is given


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(
    ("layer", "settings", "words"),
    [
        ({"head_dim": 64}, {}, "head_dim 64: the fold-at-start kernels take 128"),
        ({"spec_query_len": 9}, {}, "num_speculative_tokens 8: the fold-at-start kernels take at most 7"),
        ({"conv_size": 3}, {}, "short_conv_kernel_size 3"),
        ({"state_dtype": torch.bfloat16}, {}, "mamba_ssm_cache_dtype torch.bfloat16"),
        ({}, {"model_config": SimpleNamespace(dtype=torch.float16)}, "mamba_cache_dtype torch.bfloat16"),
        ({"recoverssm_backend": "cute"}, {}, "a Hopper GPU"),
        ({}, {"use_v2_model_runner": False}, "VLLM_USE_V2_MODEL_RUNNER=1"),
        (
            {},
            {"speculative_config": SimpleNamespace(enable_adaptive_verification=True)},
            "enable_adaptive_verification",
        ),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(
    layer: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    targets = doubles()
    replay_ssm.install(targets)
    with pytest.raises(ReplayUnsupportedError, match=words):
        targets.layer(layer, config(**settings))
    targets.layer({**layer, "use_recoverssm": False}, config(**settings))
    targets.layer({}, config())


def test_a_group_reads_the_layers_as_vllm_holds_them() -> None:
    channels, requests = 3 * HEADS * DIM, 3

    def layer() -> Any:
        return SimpleNamespace(
            kv_cache=(
                torch.zeros(5, WINDOW + 2, channels, dtype=torch.bfloat16),
                torch.zeros(5, HEADS, DIM, DIM),
            ),
            conv1d=SimpleNamespace(weight=torch.randn(channels, 1, 4)),
            A_log=torch.randn(HEADS),
            dt_bias=torch.randn(HEADS * DIM),
            gate_lower_bound=-5.0,
            recoverssm_records=SimpleNamespace(
                correction=torch.zeros(2 * requests, HEADS, WINDOW, DIM),
                key_gate=torch.zeros(2 * requests, HEADS, WINDOW, 2 * DIM, dtype=torch.bfloat16),
            ),
        )

    layers = {"a": layer(), "b": layer()}
    builder = SimpleNamespace(
        layer_names=list(layers),
        vllm_config=SimpleNamespace(
            num_speculative_tokens=WINDOW - 1,
            compilation_config=SimpleNamespace(static_forward_context=layers),
        ),
    )
    group = replay_ssm.make_group(builder)
    assert group.max_requests == requests
    assert group.window == WINDOW
    for name, held in group.layers.items():
        assert held.conv.shape == (5, channels, WINDOW + 2)
        assert held.conv.data_ptr() == layers[name].kv_cache[0].data_ptr()
        assert held.state is layers[name].kv_cache[1]
        assert torch.equal(held.conv_weight, layers[name].conv1d.weight[:, 0])
        assert held.conv_weight.stride() == (1, channels)
    layers["b"].kv_cache = (layers["b"].kv_cache[0][:, 1:], layers["b"].kv_cache[1])
    with pytest.raises(ValueError, match="layer b"):
        replay_ssm.make_group(builder)
