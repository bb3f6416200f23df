# SPDX-License-Identifier: Apache-2.0
"""From a role's configuration to vLLM's engine arguments. The only place that knows which flag a role needs.

What every role shares: no sampling on the host's side of gRPC, prefix caching in align mode (KDA states are cached at
block boundaries), explicit sizes (vLLM's own defaults grow a CPU worker past 20 GB), and this project's connector.
"""

from __future__ import annotations

import os
from typing import Any

from deltaserve import text_form
from deltaserve.config import WorkerConfig, draft_method
from deltaserve.engine.cuda import fp8_cache

CONNECTOR = "DeltaserveConnector"
CONNECTOR_MODULE = "statestore.connector"


def connector_config(config: WorkerConfig, worker_id: str, model_digest: str) -> dict[str, Any]:
    """The `kv_transfer_config` of one worker: what its connector halves read in `kv_connector_extra_config`."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer" if config.role == "prefill" else "kv_consumer",
        # What fails verification is recomputed here, and counted: never served, never an error to the client.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "worker_id": worker_id,
            "model_digest": model_digest,
            "role": config.role,
            "verify": config.verify,
            "damage": config.damage,
            "load_timeout": config.load_timeout,
            "store": config.store.model_dump(mode="json"),
        },
    }


def engine_args(config: WorkerConfig, kv_transfer_config: dict[str, Any] | None) -> dict[str, Any]:
    """vLLM `EngineArgs` of a worker, as keyword arguments.

    `kv_transfer_config` None gives the aggregated engine with otherwise the same settings, against which
    `deltaserve verify` compares. `config.extra_args` wins over everything, so that an operator can reach any vLLM flag.
    """
    args: dict[str, Any] = {
        "model": str(config.model),
        "dtype": resolved_dtype(config),
        "tensor_parallel_size": config.tp,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "enable_prefix_caching": True,
        "prefix_match_unit": config.prefix_match_unit,
        "seed": 0,
        "disable_log_stats": True,
        # On a GPU the next step is scheduled while one computes (docs/gpu.md). Drafts were verified without it, and a
        # CPU has nothing to overlap.
        "async_scheduling": config.device == "cuda" and not draft_method(config.extra_args),
    }
    if text_form.is_published(config.model):
        args["hf_overrides"] = text_form.text_alone
    if config.device == "cpu":
        args["enforce_eager"] = True
        if draft_method(config.extra_args):
            # Drafts are folded from records, and no block a draft is asked for (docs/replay_ssm.md).
            args["use_replayssm"] = True
    else:
        # kv_cache_memory_bytes says all; by this share vLLM would only refuse a GPU that another worker uses as well.
        args["gpu_memory_utilization"] = 0.01
    if config.kv_cache_dtype != "auto":
        args["kv_cache_dtype"] = config.kv_cache_dtype
    if config.reasoning_parser:
        args["reasoning_parser"] = config.reasoning_parser
    if config.dcp > 1:
        args["decode_context_parallel_size"] = config.dcp
        args["cp_kv_cache_interleave_size"] = config.dcp_interleave
        if config.device == "cuda":
            # vLLM 0.33.0's default (ag_rs) gives other tokens from the first decode step on; docs/gpu.md has the table.
            args["dcp_comm_backend"] = "a2a"
    if (
        config.device == "cpu"
        and config.role == "prefill"
        and config.checkpoint_tokens
        and config.checkpoint_limit
    ):
        # A checkpoint can be taken where a step ends, so no step may run past the place of the next one. vLLM applies
        # the first limit only where several prompts wait. Either makes a step of a GPU too small to be efficient: there
        # checkpoints are taken where steps of max_num_batched_tokens end.
        step = min(config.checkpoint_tokens, config.max_num_batched_tokens)
        args["long_prefill_token_threshold"] = step
        args["max_num_scheduled_tokens"] = step
    if kv_transfer_config is not None:
        args["kv_transfer_config"] = kv_transfer_config
    args.update(config.extra_args)
    return args


def resolved_dtype(config: WorkerConfig) -> str:
    """float32 on the CPU unless told otherwise: there it costs little, and tokens compare exactly."""
    if config.dtype == "auto":
        return "float32" if config.device == "cpu" else "auto"
    return config.dtype


def set_environment(config: WorkerConfig) -> None:
    """Environment that vLLM reads at import; call before the first import of vllm.

    Raises nothing; existing values win, so that an operator can override.
    """
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        # An answer from logits that are not numbers must end as an error, so they are counted.
        "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
        # glibc gives every thread an arena; with Mooncake's threads that alone costs hundreds of MB.
        "MALLOC_ARENA_MAX": "4",
    }
    if text_form.is_published(config.model):
        defaults[text_form.VARIABLE] = "1"
    if config.device == "cuda" and config.kv_cache_dtype == "fp8":
        defaults[fp8_cache.VARIABLE] = "1"
    if config.device == "cpu":
        # Without it vLLM reserves CPU memory by a share of the machine before kv_cache_memory_bytes is read.
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, -(-config.kv_cache_bytes // (1 << 30))))
        # Two workers on a few cores: threads that spin while they wait take the time that the others need.
        defaults["OMP_WAIT_POLICY"] = "PASSIVE"
        # vLLM compiles a helper of its log-probs even when all else runs eagerly: seconds at the first request, a C++
        # compiler on the machine, and files in the temporary folder, for nothing that a CPU would notice.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
        if config.tp == 1:
            # One rank runs in the engine's own process: half the memory, and no hop a step.
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if config.omp_threads:
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = config.omp_threads
        elif config.tp > 1:
            cores = sorted(os.sched_getaffinity(0))
            per_rank = max(1, len(cores) // config.tp)
            ranks = [cores[i * per_rank : (i + 1) * per_rank] or cores for i in range(config.tp)]
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, rank)) for rank in ranks)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
