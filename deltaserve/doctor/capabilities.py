# SPDX-License-Identifier: Apache-2.0
"""Which optimisations of vLLM's Kimi K3 work are in use, read out of a vLLM configuration and out of vLLM itself.

Nothing is deduced from a version number: each probe looks at the attribute or class that carries the feature in the
installed vLLM. An attribute that is not there means "not in this version". Private and moving names of vLLM are
touched in this file only, for 0.32.0 (CPU) and 0.33.0 (CUDA); a probe that finds another shape says so in its reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deltaserve.engine.cpu import replay

State = Literal["active", "off", "unavailable"]
"""active: in use. off: this hardware and version have it, the configuration does not use it. unavailable: not here."""

_MISSING: Any = object()

ONE_PASS = "one prefill pass"
"""Name of the capability that a running prefill worker adds its counts to (deltaserve/doctor/passes.py)."""


@dataclass(frozen=True)
class Capability:
    """One optimisation and its state here."""

    name: str
    state: State
    reason: str
    """Why, and for `off` what switches it on."""
    read_from: str
    """Where the state was read: attribute or class of vLLM, with its value where it has one."""


class ConnectorRefused(ValueError):
    """The configured connector cannot restore KDA state; the message names it and the remedy."""


def report(vllm_config: Any, kv_cache_config: Any = None) -> list[Capability]:
    """The state of every optimisation under a vLLM `VllmConfig`.

    With the engine's `kv_cache_config` the cache's own specification is read; without it the rule by which vLLM would
    decide is asked.
    """
    return [
        _adaptive_budget(vllm_config),
        _internal_checkpoints(vllm_config, kv_cache_config),
        _one_pass(vllm_config, kv_cache_config),
        _zero_copy_mixed_batches(vllm_config),
        _deferred_mxfp4(vllm_config),
        _replay_ssm(vllm_config),
        _state_offload(vllm_config),
        _context_parallelism(vllm_config),
    ]


def report_json(vllm_config: Any, kv_cache_config: Any = None) -> str:
    """`report` as a JSON list of objects with the fields of `Capability`."""
    return as_json(report(vllm_config, kv_cache_config))


def as_json(capabilities: Iterable[Capability]) -> str:
    """A JSON list of objects with the fields of `Capability`."""
    return json.dumps([asdict(capability) for capability in capabilities])


def require_state_connector(vllm_config: Any) -> None:
    """Refuse a connector that would hand over MLA without the KDA state of a hybrid model.

    Raises ConnectorRefused; a model without recurrent layers, or no connector, is none of its business.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.kv_connector or not vllm_config.model_config.is_hybrid:
        return
    connector = _connector_class(vllm_config)
    if not _handles_hybrid_memory(connector):
        raise ConnectorRefused(
            f"kv_transfer_config: {transfer.kv_connector} does not declare SupportsHMA, so it cannot restore KDA "
            "state, and a hybrid model would answer from a state that is missing; leave kv_transfer_config out of "
            "--extra-args (deltaserve sets its own), or name a connector that supports hybrid memory"
        )


# -- probes ------------------------------------------------------------------------------------------------------


def _adaptive_budget(config: Any) -> Capability:
    name = "adaptive scheduling budget"
    scheduler = config.scheduler_config
    adaptive = getattr(scheduler, "long_prefill_token_threshold_adaptive", _MISSING)
    if adaptive is _MISSING:
        return _absent(name, "scheduler_config.long_prefill_token_threshold_adaptive")
    threshold = scheduler.long_prefill_token_threshold
    where = (
        f"scheduler_config.long_prefill_token_threshold={threshold}, "
        f"long_prefill_token_threshold_adaptive={adaptive}"
    )
    if adaptive and threshold > 0:
        return Capability(
            name, "active", "a long prefill may take its fair share of a step's tokens, not less", where
        )
    return Capability(
        name,
        "off",
        "long_prefill_token_threshold > 0 with long_prefill_token_threshold_adaptive in --extra-args switches it on",
        where,
    )


def _internal_checkpoints(config: Any, kv_cache_config: Any) -> Capability:
    name = "internal KDA checkpoints"
    if kv_cache_config is not None:
        blocks = [
            getattr(spec, "num_prefill_checkpoint_blocks", _MISSING)
            for spec in _recurrent_specs(kv_cache_config)
        ]
        where = "KV cache specification: num_prefill_checkpoint_blocks"
        if not blocks or _MISSING in blocks:
            return _absent(name, where)
        where = f"{where}={max(blocks)}"
        if max(blocks) > 0:
            return Capability(name, "active", "the kernel exports the state inside one prefill pass", where)
        return Capability(name, "unavailable", _checkpoint_reason(config), where)
    supported, where = _flash_kda(config)
    if not supported:
        return Capability(name, "unavailable", _checkpoint_reason(config), where)
    if not _aligned_caching(config):
        return Capability(
            name, "off", "prefix caching in align mode (enable_prefix_caching) switches it on", where
        )
    return Capability(name, "active", "FlashKDA exports the state inside one prefill pass", where)


def _one_pass(config: Any, kv_cache_config: Any) -> Capability:
    scheduler = config.scheduler_config
    budget = getattr(scheduler, "max_num_batched_tokens", _MISSING)
    if budget is _MISSING:
        return _absent(ONE_PASS, "scheduler_config.max_num_batched_tokens")
    step = getattr(scheduler, "max_num_scheduled_tokens", None) or budget
    where = f"scheduler_config.max_num_scheduled_tokens={step}, max_num_batched_tokens={budget}"
    words = f"a prompt is computed in forward passes of at most {step} tokens, every token once"
    if step < budget:
        # Not hidden: more passes than the budget asks for.
        words += "; passes are cut there, because a checkpoint is taken where one ends (--checkpoint-tokens)"
        return Capability(ONE_PASS, "off", words, where)
    if _internal_checkpoints(config, kv_cache_config).state == "active":
        return Capability(ONE_PASS, "active", f"{words}; the aligned state comes out of the last one", where)
    if _aligned_caching(config):
        words += "; one more where the last aligned state is kept, because a pass ends there"
        return Capability(ONE_PASS, "unavailable", words, where)
    return Capability(ONE_PASS, "active", words, where)


def _checkpoint_reason(config: Any) -> str:
    if not _is_cuda():
        return (
            "only FlashKDA on CUDA exports a state from inside a pass; here a pass is split at the boundary"
        )
    return (
        "FlashKDA needs head_dim 128, bfloat16 and a bounded gate (gate_lower_bound); "
        "here a pass is split at the boundary"
    )


def _zero_copy_mixed_batches(config: Any) -> Capability:
    name = "zero-copy mixed batches"
    where = "vllm.models.kimi_k3.nvidia.kda_metadata: spec_token_start"
    if not _is_cuda():
        return Capability(
            name, "unavailable", "only the CUDA model writes both halves of a mixed batch in place", where
        )
    source = _source("vllm.models.kimi_k3.nvidia.kda_metadata")
    if "spec_token_start" not in source:
        return _absent(name, where)
    if config.num_speculative_tokens == 0:
        return Capability(
            name,
            "off",
            "it concerns batches that mix speculation with prefill; speculative_config switches it on",
            where,
        )
    return Capability(
        name, "active", "speculative and other tokens of a step lie in two slices, not in copies", where
    )


def _deferred_mxfp4(config: Any) -> Capability:
    name = "deferred MXFP4 finalization"
    module = "vllm.model_executor.layers.fused_moe.experts.trtllm_mxfp4_moe"
    where = f"{module}: TrtLlmMxfp4ExpertsMonolithic"
    if not _has_module(module):
        return _absent(name, where)
    capability = _compute_capability()
    if capability is None or capability[0] != 10:
        return Capability(
            name,
            "unavailable",
            f"its experts run on Blackwell (compute capability 10.x); this is {_device_words(capability)}",
            where,
        )
    quantization = str(config.model_config.quantization or "none")
    tp = config.parallel_config.tensor_parallel_size
    where = f"{where}; quantization={quantization}, tensor_parallel_size={tp}"
    if "mxfp4" not in quantization:
        return Capability(name, "off", f"the weights are {quantization}, not MXFP4", where)
    if tp == 1:
        return Capability(name, "off", "it is fused into the all-reduce; --tp above 1 switches it on", where)
    return Capability(name, "active", "top-k reduction is fused into the all-reduce", where)


def _replay_ssm(config: Any) -> Capability:
    name = "ReplaySSM"
    cache = config.cache_config
    used = getattr(cache, "use_replayssm", _MISSING)
    if used is _MISSING:
        return _absent(name, "cache_config.use_replayssm")
    supports = getattr(config.model_config, "supports_replayssm", False)
    where = f"cache_config.use_replayssm={used}, model_config.supports_replayssm={supports}"
    if used:
        return Capability(
            name, "active", "rejected drafts are folded from recorded inputs, not from stored states", where
        )
    if not _is_cuda():
        return _cpu_replay_ssm(config, name)
    if not supports:
        return Capability(
            name, "unavailable", "the model's class in this vLLM does not declare SupportsReplaySSM", where
        )
    if config.kv_transfer_config is not None and _refuses_connector_with_replay():
        return Capability(
            name,
            "unavailable",
            "this vLLM refuses use_replayssm together with a KV connector (0.33 allows it)",
            where,
        )
    if config.num_speculative_tokens == 0:
        return Capability(
            name,
            "off",
            "speculative_config together with use_replayssm in --extra-args switches it on",
            where,
        )
    return Capability(name, "off", "use_replayssm in --extra-args switches it on", where)


def _cpu_replay_ssm(config: Any, name: str) -> Capability:
    """This project's own engine folds on a CPU; it has taken vLLM's setting over."""
    on, drafts = replay.wanted(config), config.num_speculative_tokens
    where = f"additional_config[{replay.NOTE!r}] and num_speculative_tokens={drafts}"
    if on:
        return Capability(name, "active", "accepted drafts are folded from records, in torch", where)
    if drafts:
        return Capability(
            name, "off", "a state is written a position; use_replayssm in extra_args folds instead", where
        )
    return Capability(
        name, "off", "it concerns drafts; speculative_config in extra_args switches it on", where
    )


def _state_offload(config: Any) -> Capability:
    name = "hybrid state offload with pins"
    transfer = config.kv_transfer_config
    if transfer is None or not transfer.kv_connector:
        return Capability(
            name,
            "off",
            "no connector is configured; prefill and decode roles set one",
            "kv_transfer_config=None",
        )
    connector = _connector_class(config)
    hybrid = _handles_hybrid_memory(connector)
    pins = _pinning_methods(connector)
    where = f"{connector.__module__}.{connector.__name__}: SupportsHMA={hybrid}, pins by {', '.join(pins) or 'nothing'}"
    if not hybrid:
        return Capability(name, "unavailable", "the connector does not declare SupportsHMA", where)
    if not pins:
        return Capability(
            name, "unavailable", "the connector cannot keep blocks while they are written", where
        )
    if not _aligned_caching(config):
        return Capability(
            name,
            "off",
            "prefix caching in align mode hands off the states; enable_prefix_caching switches it on",
            where,
        )
    return Capability(
        name, "active", "states leave with their blocks pinned until every rank has written", where
    )


def _context_parallelism(config: Any) -> Capability:
    name = "decode context parallelism (DCP)"
    parallel = config.parallel_config
    size = getattr(parallel, "decode_context_parallel_size", _MISSING)
    if size is _MISSING:
        return _absent(name, "parallel_config.decode_context_parallel_size")
    tp = parallel.tensor_parallel_size
    where = f"parallel_config.decode_context_parallel_size={size}, tensor_parallel_size={tp}"
    if size > 1:
        return Capability(name, "active", f"latent attention's cache is spread over {size} ranks", where)
    if tp == 1:
        return Capability(
            name, "off", "it divides tensor parallelism; --tp and --dcp above 1 switch it on", where
        )
    return Capability(name, "off", "--dcp above 1 switches it on (decode role)", where)


# -- looking into vLLM -------------------------------------------------------------------------------------------


def _absent(name: str, where: str) -> Capability:
    return Capability(name, "unavailable", "the installed vLLM has no such feature under this name", where)


def _is_cuda() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def _compute_capability() -> tuple[int, int] | None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    return None if capability is None else (capability.major, capability.minor)


def _device_words(capability: tuple[int, int] | None) -> str:
    return "a CPU" if capability is None else f"compute capability {capability[0]}.{capability[1]}"


def _flash_kda(config: Any) -> tuple[bool, str]:
    where = "vllm.models.kimi_k3.nvidia.kda.is_flashkda_supported"
    if not _is_cuda():
        return False, f"{where}: the platform is not CUDA"
    import torch

    decide = getattr(importlib.import_module("vllm.models.kimi_k3.nvidia.kda"), "is_flashkda_supported", None)
    if decide is None:
        return False, f"{where}: not in this version"
    text = config.model_config.hf_text_config
    linear = getattr(text, "linear_attn_config", None) or {}
    supported = bool(
        decide(
            linear.get("head_dim", 0),
            config.model_config.dtype,
            torch.float32,
            linear.get("gate_lower_bound"),
        )
    )
    return supported, f"{where}={supported}"


def _recurrent_specs(kv_cache_config: Any) -> Iterable[Any]:
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        for inner in getattr(spec, "kv_cache_specs", {"": spec}).values():
            if type(inner).__name__ == "MambaSpec":
                yield inner


def _aligned_caching(config: Any) -> bool:
    cache = config.cache_config
    return bool(cache.enable_prefix_caching) and getattr(cache, "mamba_cache_mode", "none") == "align"


def _connector_class(config: Any) -> type[Any]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.get_connector_class(config.kv_transfer_config)


def _handles_hybrid_memory(connector: type[Any]) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

    check: Callable[[Any], bool] = supports_hma
    return bool(check(connector))


def _pinning_methods(connector: type[Any]) -> list[str]:
    """Methods by which a connector keeps blocks of several cache groups: overridden, not the base class's no-ops."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    names = ("bind_gpu_block_pool", "request_finished_all_groups")
    return [
        name
        for name in names
        if hasattr(connector, name)
        and getattr(connector, name) is not getattr(KVConnectorBase_V1, name, None)
    ]


def _refuses_connector_with_replay() -> bool:
    return "--use-replayssm is incompatible with KV connectors" in _source("vllm.config.vllm")


def _has_module(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()
