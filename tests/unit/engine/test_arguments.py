# SPDX-License-Identifier: Apache-2.0
"""What a worker tells vLLM, and the environment it finds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deltaserve.config import ClusterConfig, WorkerConfig
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


def test_workers_may_share_a_gpu() -> None:
    assert engine_args(WorkerConfig(device="cuda"), None)["gpu_memory_utilization"] < 0.1
    assert "gpu_memory_utilization" not in engine_args(WorkerConfig(), None)
    chosen = WorkerConfig(device="cuda", extra_args={"gpu_memory_utilization": 0.5})
    assert engine_args(chosen, None)["gpu_memory_utilization"] == 0.5


def test_context_parallel_ranks_of_gpus_exchange_all_to_all() -> None:
    assert engine_args(WorkerConfig(device="cuda", tp=2, dcp=2), None)["dcp_comm_backend"] == "a2a"
    assert "dcp_comm_backend" not in engine_args(WorkerConfig(device="cuda", tp=2), None)
    assert "dcp_comm_backend" not in engine_args(WorkerConfig(tp=2, dcp=2), None), (
        "vLLM 0.32 on a CPU has our own"
    )
    with pytest.raises(ValidationError, match=r"extra_args\.dcp_comm_backend: with ag_rs"):
        WorkerConfig(device="cuda", tp=2, dcp=2, extra_args={"dcp_comm_backend": "ag_rs"})
    assert WorkerConfig(device="cuda", tp=2, extra_args={"dcp_comm_backend": "ag_rs"}), "nothing is exchanged"


def test_roles_without_checkpoints_have_no_such_steps() -> None:
    for config in (
        WorkerConfig(role="decode"),
        WorkerConfig(role="prefill", checkpoint_tokens=0),
        WorkerConfig(role="prefill", checkpoint_bytes=0),
    ):
        assert "long_prefill_token_threshold" not in engine_args(config, None)


def test_further_arguments_win() -> None:
    config = WorkerConfig(extra_args={"max_num_seqs": 99})
    assert engine_args(config, None)["max_num_seqs"] == 99


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_drafts_that_give_the_same_tokens_are_taken(method: str) -> None:
    drafts = {"speculative_config": {"method": method, "num_speculative_tokens": 3}}
    assert engine_args(WorkerConfig(extra_args=drafts), None) == {
        **engine_args(WorkerConfig(), None),
        "use_replayssm": True,
        **drafts,
    }
    written = {**drafts, "use_replayssm": False}
    assert engine_args(WorkerConfig(extra_args=written), None)["use_replayssm"] is False, "a state a position"
    on_a_gpu = WorkerConfig(device="cuda", extra_args=drafts)
    assert "use_replayssm" not in engine_args(on_a_gpu, None), "vLLM's own there, and asked for by its name"


def test_other_drafts_are_refused_on_the_cpu() -> None:
    drafts = {"speculative_config": {"method": "eagle3", "model": "somewhere"}}
    with pytest.raises(
        ValueError, match=r"extra_args\.speculative_config: on the CPU.*eagle3.*use ngram or mtp"
    ):
        WorkerConfig(extra_args=drafts)
    with pytest.raises(ValueError, match="answers with unnamed drafts"):
        WorkerConfig(extra_args={"speculative_config": "ngram"})
    assert WorkerConfig(device="cuda", extra_args=drafts).extra_args == drafts, "the control"
    assert WorkerConfig(extra_args={"speculative_config": None})


def test_drafts_do_not_go_with_context_parallelism_on_the_cpu() -> None:
    drafts = {"speculative_config": {"method": "ngram"}}
    with pytest.raises(ValueError, match=r"extra_args\.speculative_config: on the CPU not with dcp 2"):
        WorkerConfig(tp=2, dcp=2, extra_args=drafts)
    assert WorkerConfig(tp=2, dcp=2).dcp == 2, "the control"
    assert WorkerConfig(tp=2, extra_args=drafts).extra_args == drafts, "the control"


def test_prefill_workers_run_the_drafts_layer_too() -> None:
    mtp = {"method": "mtp", "model": "m", "num_speculative_tokens": 2}
    cluster = ClusterConfig(
        decode_options={"extra_args": {"speculative_config": mtp}},
        prefill_options={"load_timeout": 5, "extra_args": {"max_num_seqs": 3}},
    )
    assert cluster.drafts == mtp
    assert cluster.worker_options("decode") == cluster.decode_options
    assert cluster.worker_options("prefill") == {
        "load_timeout": 5,
        "extra_args": {"max_num_seqs": 3, "speculative_config": mtp},
    }
    theirs = {"extra_args": {"speculative_config": None}}
    told = cluster.model_copy(update={"prefill_options": theirs})
    assert told.worker_options("prefill") == theirs


def test_drafts_without_a_layer_are_the_decode_workers_alone() -> None:
    ngram = {"extra_args": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}}
    assert ClusterConfig(decode_options=ngram).worker_options("prefill") == {}
    assert ClusterConfig().worker_options("prefill") == {}
    assert ClusterConfig().drafts == {}


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


def test_the_caches_dtype_is_asked_for_on_cuda_alone() -> None:
    assert "kv_cache_dtype" not in engine_args(WorkerConfig(device="cuda"), None)
    config = WorkerConfig(device="cuda", kv_cache_dtype="fp8")
    assert engine_args(config, None)["kv_cache_dtype"] == "fp8"
    with pytest.raises(ValueError, match="kv_cache_dtype: the CPU's attention"):
        WorkerConfig(device="cpu", kv_cache_dtype="fp8")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_steps_are_scheduled_ahead_on_a_gpu(role: Any) -> None:
    def chosen(device: Any, **extra: Any) -> Any:
        return engine_args(WorkerConfig(role=role, device=device, extra_args=extra), None)["async_scheduling"]

    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    assert chosen("cuda") is True
    assert chosen("cuda", speculative_config=drafts) is False
    assert chosen("cuda", async_scheduling=False) is False
    assert chosen("cuda", speculative_config=drafts, async_scheduling=True) is True
    assert chosen("cpu") is False
