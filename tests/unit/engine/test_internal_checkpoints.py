# SPDX-License-Identifier: Apache-2.0
"""The switch that takes a prefill's internal checkpoints away, so that both paths can be compared."""

from __future__ import annotations

import importlib

import pytest

from deltaserve.engine.cuda import internal_checkpoints

kda_checkpoint = pytest.importorskip("vllm.model_executor.layers.mamba.kda_checkpoint")


def test_vllm_is_told_that_the_kernel_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    alignment = kda_checkpoint.kda_prefill_checkpoint_alignment
    monkeypatch.setattr(kda_checkpoint, "kda_prefill_checkpoint_alignment", alignment)  # put back afterwards
    assert alignment("flashkda") == 16, "control: it takes them"
    for kept in ("", "1"):
        monkeypatch.setenv(internal_checkpoints.VARIABLE, kept)
        assert not internal_checkpoints.install()
        assert kda_checkpoint.kda_prefill_checkpoint_alignment is alignment
    monkeypatch.setenv(internal_checkpoints.VARIABLE, "0")
    assert internal_checkpoints.install()
    assert (
        importlib.import_module(kda_checkpoint.__name__).kda_prefill_checkpoint_alignment("flashkda") is None
    )


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(internal_checkpoints.VARIABLE, "no")
    with pytest.raises(ValueError, match="DELTASERVE_INTERNAL_CHECKPOINTS='no'"):
        internal_checkpoints.install()


def test_a_vllm_without_the_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(internal_checkpoints.VARIABLE, "0")
    monkeypatch.delattr(kda_checkpoint, "kda_prefill_checkpoint_alignment")
    with pytest.raises(internal_checkpoints.UnsupportedVllmError, match="leave the variable out"):
        internal_checkpoints.install()
