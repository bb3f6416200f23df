# SPDX-License-Identifier: Apache-2.0
"""The exporter of a prefill's internal checkpoints says how long a history is, and the switch that takes them away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deltaserve.engine.cuda import internal_checkpoints

kda_checkpoint = pytest.importorskip("vllm.model_executor.layers.mamba.kda_checkpoint")
NAMES = ("kda_prefill_checkpoint_alignment", "FlashKDAPrefillCheckpointExporter")


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setattr(kda_checkpoint, name, getattr(kda_checkpoint, name))
    monkeypatch.delenv(internal_checkpoints.VARIABLE, raising=False)


def a_model(monkeypatch: pytest.MonkeyPatch, **linear: Any) -> None:
    import vllm.config

    text = SimpleNamespace(linear_attn_config=linear)
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: config)


def test_the_exporter_takes_the_history_and_not_the_caches_width(monkeypatch: pytest.MonkeyPatch) -> None:
    a_model(monkeypatch, short_conv_kernel_size=4)
    before = kda_checkpoint.FlashKDAPrefillCheckpointExporter
    assert before().state_len is None, "control: vLLM takes the cache's width then, drafts' columns and all"
    assert not internal_checkpoints.install()
    after = kda_checkpoint.FlashKDAPrefillCheckpointExporter
    assert issubclass(after, before)
    assert after().state_len == 3
    assert after(state_len=2).state_len == 2, "whoever says it is believed"
    internal_checkpoints.install()
    assert kda_checkpoint.FlashKDAPrefillCheckpointExporter is after, "once"


def test_vllm_is_told_that_the_kernel_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    alignment = kda_checkpoint.kda_prefill_checkpoint_alignment
    assert alignment("flashkda") == 16, "control: it takes them"
    for kept in ("", "1"):
        monkeypatch.setenv(internal_checkpoints.VARIABLE, kept)
        assert not internal_checkpoints.install()
        assert kda_checkpoint.kda_prefill_checkpoint_alignment is alignment
    monkeypatch.setenv(internal_checkpoints.VARIABLE, "0")
    assert internal_checkpoints.install()
    assert kda_checkpoint.kda_prefill_checkpoint_alignment("flashkda") is None


def test_a_layer_that_has_bound_the_names_is_given_the_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    user = SimpleNamespace(**{name: getattr(kda_checkpoint, name) for name in NAMES})
    monkeypatch.setitem(internal_checkpoints.sys.modules, internal_checkpoints._USER, user)
    monkeypatch.setenv(internal_checkpoints.VARIABLE, "0")
    internal_checkpoints.install()
    assert user.kda_prefill_checkpoint_alignment("flashkda") is None
    assert user.FlashKDAPrefillCheckpointExporter is kda_checkpoint.FlashKDAPrefillCheckpointExporter


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(internal_checkpoints.VARIABLE, "no")
    with pytest.raises(ValueError, match="DELTASERVE_INTERNAL_CHECKPOINTS='no'"):
        internal_checkpoints.install()


@pytest.mark.parametrize("name", NAMES)
def test_a_vllm_without_the_names_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kda_checkpoint, name)
    with pytest.raises(internal_checkpoints.UnsupportedVllmError, match=f"no .*{name}; install vLLM 0.33.0"):
        internal_checkpoints.install()


@pytest.mark.gpu
def test_what_is_stored_are_the_last_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with columns for two drafts: what goes on from the checkpoint reads the first three of five."""
    import torch

    checkpoint = pytest.importorskip("vllm.model_executor.layers.mamba.checkpoint")
    a_model(monkeypatch, short_conv_kernel_size=4)
    raw = torch.randn(64, 24, device="cuda", dtype=torch.bfloat16)
    recurrent = torch.randn(1, 2, 4, 4, device="cuda")
    where = checkpoint.MambaPrefillCheckpointMetadata(
        torch.tensor([48], dtype=torch.int32, device="cuda"),
        torch.tensor([2], dtype=torch.int32, device="cuda"),
    )

    def stored(exporter: Any) -> Any:
        conv = torch.zeros(4, 24, 5, device="cuda", dtype=torch.bfloat16)
        state = torch.zeros(4, 2, 4, 4, device="cuda")
        exporter.export(
            where,
            raw_qkv=raw,
            conv_state=conv,
            cu_seqlens=torch.tensor([0, 64], dtype=torch.int32, device="cuda"),
            recurrent_checkpoint=recurrent,
            recurrent_state=state,
        )
        assert torch.equal(state[2], recurrent[0])
        assert not conv[[0, 1, 3]].any()
        return conv[2, :, :3]

    before = kda_checkpoint.FlashKDAPrefillCheckpointExporter
    internal_checkpoints.install()
    after = kda_checkpoint.FlashKDAPrefillCheckpointExporter
    assert torch.equal(stored(after()), raw[45:48].T)
    assert torch.equal(stored(before()), raw[43:46].T), (
        "control: without the mend they are two tokens too old"
    )
