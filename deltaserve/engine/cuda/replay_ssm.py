# SPDX-License-Identifier: Apache-2.0
"""Fold-at-start in place of RecoverSSM's verify and commit in vLLM's Kimi K3 layers on CUDA (docs/replay_ssm.md).

Chosen by ``DELTASERVE_REPLAY_SSM=1`` (or ``=ring``: the ring, which writes a state when 16 accepted tokens have
gathered) in the environment of every vLLM process, together with vLLM's own ``use_replayssm`` and drafts. vLLM then
plans, allocates and schedules exactly as for RecoverSSM: one state slot a request, no speculative blocks. Exchanged
are:

    KDARecoverSSMRecords.allocate                 two record rows a request instead of one, longer ones for the ring
    KimiK3KDAMetadataBuilder                      build: where this step's records lie, before the layers run
                                                  _get_recoverssm_context: an EngineRecords, whose commit vLLM calls
    KimiK3DeltaAttention                          __init__: refuse what the kernels do not take
                                                  _recoverssm_verify: the launch of a layer
    MambaHybridModelState                         prepare_attn: which request is in which batch row
                                                  add_request: nothing is pending in a row that is taken anew

All names are of vLLM 0.33.0 and checked before anything is exchanged.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from dataclasses import dataclass, field
from typing import Any

from deltaserve.engine.cpu.vllm_version import UnsupportedVllmError

VARIABLE = "DELTASERVE_REPLAY_SSM"
RING = 16
"""Accepted tokens that a ring gathers before it writes the state."""

SUPPORTED_VERSION = "0.33.0"
_INSTALLED = "deltaserve_replay_ssm"


class ReplayUnsupportedError(ValueError):
    """A model or configuration that the fold-at-start kernels do not take."""


@dataclass(frozen=True)
class Targets:
    """The classes of vLLM whose methods are exchanged."""

    version: str
    layer: Any
    """KimiK3DeltaAttention"""
    builder: Any
    """KimiK3KDAMetadataBuilder"""
    records: Any
    """KDARecoverSSMRecords"""
    model_state: Any
    """MambaHybridModelState"""

    @classmethod
    def of_vllm(cls) -> Targets:
        """Import them. Raise UnsupportedVllmError where this is another vLLM, or has no such names."""
        from vllm import __version__

        require_version(__version__)
        try:
            from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
            from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadataBuilder
            from vllm.models.kimi_k3.nvidia.ops.recoverssm import KDARecoverSSMRecords
            from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
        except ImportError as error:
            raise UnsupportedVllmError(_refusal(__version__, str(error))) from error
        return cls(
            __version__,
            KimiK3DeltaAttention,
            KimiK3KDAMetadataBuilder,
            KDARecoverSSMRecords,
            MambaHybridModelState,
        )


@dataclass
class Step:
    """What the model runner knows of the step that it prepares, and the builders of metadata are not told."""

    idx_mapping: Any = None
    """Batch row -> request, on the device."""
    read_after: bool = False
    """A prompt's last token is among the windows: somebody may read its state when the step is over."""
    groups: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """Every EngineRecords of this process."""


_EXPECTED: dict[str, dict[str, tuple[str, ...]]] = {
    "layer": {
        "__init__": ("self", "config", "vllm_config", "prefix"),
        "_recoverssm_verify": (
            "self", "m", "mixed_qkv", "raw_g", "raw_beta", "conv_weight", "query_start_loc", "out",
        ),
    },
    "builder": {
        "_get_recoverssm_context": ("self",),
        "build": (
            "self", "common_prefix_len", "common_attn_metadata", "num_accepted_tokens",
            "num_decode_draft_tokens_cpu", "fast_build",
        ),
    },
    "records": {"allocate": ("max_num_reqs", "num_heads", "spec_query_len", "head_dim", "dtype", "device")},
    "model_state": {
        "prepare_attn": ("self", "input_batch"),
        "add_request": ("self", "req_index", "new_req_data"),
    },
}  # fmt: skip


def _refusal(version: str, why: str) -> str:
    return (
        f"{VARIABLE}: vLLM {version}: {why}. Fold-at-start was written for vLLM {SUPPORTED_VERSION}: install that, "
        f"or unset {VARIABLE} and use vLLM's own RecoverSSM"
    )


def require_version(version: str) -> None:
    """Raise UnsupportedVllmError for a vLLM whose private names nobody has compared with those used here."""
    if version.split("+")[0] != SUPPORTED_VERSION:
        raise UnsupportedVllmError(_refusal(version, "another version"))


def selected() -> bool:
    """Whether the environment asks for it. Raise ``ValueError`` for a value that says neither yes nor no."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1", "ring"):
        raise ValueError(
            f"{VARIABLE}={value!r}: 1 switches fold-at-start on, ring the ring, 0 or nothing leaves both off"
        )
    return value in ("1", "ring")


def flush_at() -> int:
    """How many accepted tokens gather before a state is written: 1 folds at the start of every step."""
    return RING if os.environ.get(VARIABLE) == "ring" else 1


def install(targets: Targets | None = None) -> bool:
    """Exchange the methods, once a process, if the environment asks for it; return whether it does.

    Raise UnsupportedVllmError for another vLLM than the one this was written for.
    """
    if not selected():
        return False
    targets = targets or Targets.of_vllm()
    if hasattr(targets.layer, _INSTALLED):
        return True
    require_version(targets.version)
    for kind, methods in _EXPECTED.items():
        for name, parameters in methods.items():
            method = getattr(getattr(targets, kind), name, None)
            found = tuple(inspect.signature(method).parameters) if method is not None else ()
            if found[: len(parameters)] != parameters:
                raise UnsupportedVllmError(
                    _refusal(
                        targets.version,
                        f"{getattr(targets, kind).__name__}.{name} takes {found}, not {parameters}",
                    )
                )
    step = Step()
    _exchange_model_state(targets.model_state, step)
    _exchange_records(targets.records)
    _exchange_builder(targets.builder, step)
    _exchange_layer(targets.layer)
    setattr(targets.layer, _INSTALLED, step)
    return True


def _exchange_model_state(model_state: Any, step: Step) -> None:
    prepare, add = model_state.prepare_attn, model_state.add_request

    @functools.wraps(prepare)
    def prepare_attn(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        step.idx_mapping = input_batch.idx_mapping
        tails = input_batch.prefill_runs_as_decode_np
        step.read_after = tails is not None and bool(tails.any())
        return prepare(self, input_batch, *args, **kwargs)

    @functools.wraps(add)
    def add_request(self: Any, req_index: int, new_req_data: Any) -> None:
        add(self, req_index, new_req_data)
        for group in step.groups:
            group.forget(req_index)

    model_state.prepare_attn, model_state.add_request = prepare_attn, add_request


def _exchange_records(records: Any) -> None:
    allocate = records.allocate

    @functools.wraps(allocate)
    def allocate_pairs(
        max_num_reqs: int, num_heads: int, spec_query_len: int, *args: Any, **kwargs: Any
    ) -> Any:
        return allocate(2 * max_num_reqs, num_heads, spec_query_len + flush_at() - 1, *args, **kwargs)

    records.allocate = staticmethod(allocate_pairs)


def _exchange_builder(builder: Any, step: Step) -> None:
    build = builder.build

    def get_context(self: Any) -> Any:
        if self.recoverssm_context is None:
            self.recoverssm_context = make_group(self)
            step.groups.add(self.recoverssm_context)
        return self.recoverssm_context

    @functools.wraps(build)
    def build_and_plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(self, *args, **kwargs)
        commit = metadata.recoverssm_commit
        if commit is not None:
            metadata.recoverssm_context.plan(
                step.idx_mapping,
                commit.state_indices,
                commit.query_start_loc,
                windows=metadata.num_spec_decodes,
                request_indices=commit.request_indices,
                flush_now=step.read_after,
            )
        return metadata

    builder._get_recoverssm_context, builder.build = get_context, build_and_plan


def make_group(builder: Any) -> Any:
    """The EngineRecords of a metadata builder's layers; called when their caches and weights are in place."""
    from decode_worker.replay_ssm.gpu_engine import EngineRecords, LayerTensors
    from decode_worker.replay_ssm.records import WindowRecords

    known = builder.vllm_config.compilation_config.static_forward_context
    layers = {}
    for name in builder.layer_names:
        layer = known[name]
        conv, state = layer.kv_cache[:2]
        weight = layer.conv1d.weight
        taps = weight.view(weight.size(0), weight.size(2)).detach().t().contiguous()
        channels = taps.shape[1]
        layers[name] = LayerTensors(
            conv_weight=taps.t(),
            a_log=layer.A_log.detach(),
            dt_bias=layer.dt_bias.detach(),
            lower_bound=layer.gate_lower_bound,
            state=state,
            conv=conv if conv.shape[1] == channels else conv.transpose(-1, -2),
            records=WindowRecords(layer.recoverssm_records.correction, layer.recoverssm_records.key_gate),
        )
    group = EngineRecords(layers, 1 + builder.vllm_config.num_speculative_tokens, flush_at=flush_at())
    if next(iter(layers.values())).state.is_cuda:
        group.warm_up(align=builder.vllm_config.cache_config.mamba_cache_mode == "align")
    return group


def _exchange_layer(layer: Any) -> None:
    create = layer.__init__

    @functools.wraps(create)
    def __init__(self: Any, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        create(self, config, vllm_config, *args, **kwargs)
        if self.use_recoverssm:
            require_supported(self, vllm_config)

    def verify(
        self: Any,
        m: Any,
        mixed_qkv: Any,
        raw_g: Any,
        raw_beta: Any,
        conv_weight: Any,
        query_start_loc: Any,
        out: Any,
    ) -> Any:
        if out is None:
            out = mixed_qkv.new_empty((1, mixed_qkv.shape[0], self.local_num_heads, self.head_dim))
        m.recoverssm_context.advance(self.prefix, mixed_qkv, raw_g, raw_beta, out, m.num_spec_decodes)
        return out

    layer.__init__, layer._recoverssm_verify = __init__, verify


def require_supported(layer: Any, vllm_config: Any) -> None:
    """Raise ReplayUnsupportedError for a KDA layer, device or configuration that the kernels do not take."""
    from decode_worker.replay_ssm.gpu_path import HEAD_DIM, TILE

    conv_dtype, state_dtype = (str(dtype) for dtype in layer.get_state_dtype()[:2])
    model_dtype = str(vllm_config.model_config.dtype)
    speculative = vllm_config.speculative_config
    wanted = (
        (layer.head_dim == HEAD_DIM, f"head_dim {layer.head_dim}", f"{HEAD_DIM}"),
        (
            layer.spec_query_len <= TILE,
            f"num_speculative_tokens {layer.spec_query_len - 1}",
            f"at most {TILE - 1}",
        ),
        (layer.conv_size == 4, f"short_conv_kernel_size {layer.conv_size}", "4"),
        (layer.conv1d.bias is None, "a convolution with a bias", "none"),
        (state_dtype == "torch.float32", f"mamba_ssm_cache_dtype {state_dtype}", "float32 (auto)"),
        (conv_dtype == model_dtype, f"mamba_cache_dtype {conv_dtype}", f"the model's {model_dtype} (auto)"),
        (
            layer.recoverssm_backend == "triton",
            f"the {layer.recoverssm_backend} kernels of RecoverSSM",
            "a Hopper GPU",
        ),
        (bool(vllm_config.use_v2_model_runner), "the V1 model runner", "VLLM_USE_V2_MODEL_RUNNER=1"),
        (
            not getattr(speculative, "enable_adaptive_verification", False),
            "enable_adaptive_verification",
            "fixed numbers of drafts",
        ),
    )
    for fits, found, needed in wanted:
        if not fits:
            raise ReplayUnsupportedError(
                f"{VARIABLE}: {found}: the fold-at-start kernels take {needed}; change it, or unset {VARIABLE} and use "
                "vLLM's own RecoverSSM"
            )
