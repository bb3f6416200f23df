# SPDX-License-Identifier: Apache-2.0
"""What a worker tells vLLM, and the environment it finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltaserve.config import WorkerConfig
from deltaserve.engine.arguments import connector_config, engine_args, set_environment
from deltaserve.engine.digest import model_digest

DEMO = Path(__file__).parents[3] / "models" / "demo"


def test_memory_is_bounded_by_configuration() -> None:
    config = WorkerConfig(kv_cache_bytes=64 << 20, max_num_seqs=3, max_num_batched_tokens=512)
    args = engine_args(config, None)
    assert args["kv_cache_memory_bytes"] == 64 << 20
    assert (args["max_num_seqs"], args["max_num_batched_tokens"]) == (3, 512)
    assert "kv_transfer_config" not in args, "the aggregated reference has no connector"


def test_each_role_gets_this_projects_connector_and_recomputes_what_fails() -> None:
    for role, kind in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        transfer = connector_config(WorkerConfig(role=role), "w", "d")  # type: ignore[arg-type]
        assert transfer["kv_role"] == kind
        assert transfer["kv_load_failure_policy"] == "recompute"
        assert transfer["kv_connector_module_path"] == "statestore.connector"


def test_steps_of_a_prefill_end_where_checkpoints_may_lie() -> None:
    args = engine_args(WorkerConfig(role="prefill", checkpoint_tokens=256), None)
    assert (args["long_prefill_token_threshold"], args["max_num_scheduled_tokens"]) == (256, 256)
    on_gpu = engine_args(WorkerConfig(role="prefill", checkpoint_tokens=256, device="cuda"), None)
    assert "long_prefill_token_threshold" not in on_gpu
    assert "max_num_scheduled_tokens" not in on_gpu
    for config in (
        WorkerConfig(role="decode"),
        WorkerConfig(role="prefill", checkpoint_tokens=0),
        WorkerConfig(role="prefill", checkpoint_bytes=0),
    ):
        assert "long_prefill_token_threshold" not in engine_args(config, None)


def test_further_arguments_win() -> None:
    config = WorkerConfig(extra_args={"max_num_seqs": 99})
    assert engine_args(config, None)["max_num_seqs"] == 99


def test_drafts_are_refused_where_they_would_change_answers() -> None:
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    with pytest.raises(ValueError, match=r"extra_args\.speculative_config: on the CPU.*leave it out"):
        WorkerConfig(extra_args=drafts)
    assert WorkerConfig(device="cuda", extra_args=drafts).extra_args == drafts, "the control"
    assert WorkerConfig(extra_args={"speculative_config": None})


def test_the_environment_is_set_and_never_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHDYNAMO_DISABLE", "OMP_WAIT_POLICY", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    # Keys that the call adds must go with the test.
    for name in (
        "VLLM_CPU_KVCACHE_SPACE",
        "MALLOC_ARENA_MAX",
        "VLLM_LOGGING_LEVEL",
        "TOKENIZERS_PARALLELISM",
    ):
        monkeypatch.setenv(name, os.environ.get(name, "4"))
    for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "x")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "x")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    set_environment(WorkerConfig(device="cpu", tp=1))
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_digest_tells_models_and_types_apart(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in DEMO.iterdir():
        if path.suffix in (".json", ".safetensors"):
            (copy / path.name).write_bytes(path.read_bytes())
    same = model_digest(DEMO, "float32")
    assert model_digest(copy, "float32") == same
    assert model_digest(copy, "bfloat16") != same
    weights = sorted(copy.glob("*.safetensors"))[0]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert model_digest(copy, "float32") != same
    weights.unlink()
    for left in copy.glob("*.safetensors"):
        left.unlink()
    with pytest.raises(FileNotFoundError, match="weights"):
        model_digest(copy, "float32")
