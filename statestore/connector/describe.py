# SPDX-License-Identifier: Apache-2.0
"""From vLLM's cache configuration to this project's `Geometry`: read, never guessed.

Touches vLLM's `MambaSpec` (shapes (conv, recurrent), dtypes, block size) and `MLAAttentionSpec` (head size, dtype),
as 0.32.0 and 0.33.0 have them; a model whose specifications look different is refused by name.
"""

from __future__ import annotations

import re
from typing import Any

from statestore.geometry import Geometry

_DTYPES = {
    "torch.float32": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float8_e4m3fn": "float8_e4m3",
    "torch.float8_e5m2": "float8_e5m2",
    # vLLM stores fp8 caches as bytes.
    "torch.uint8": "float8_e4m3",
}


class NotHybrid(ValueError):
    """The model's cache is not one of KDA states and MLA rows."""


def layer_index(layer_name: str) -> int:
    """Index in the model of the layer that vLLM calls `layer_name`. Raises NotHybrid when there is none in it."""
    match = re.search(r"layers\.(\d+)\.", layer_name)
    if match is None:
        raise NotHybrid(f"cache layer {layer_name!r} has no index; deltaserve serves KDA + MLA models")
    return int(match.group(1))


def split_groups(kv_cache_config: Any) -> tuple[dict[int, tuple[str, int]], dict[int, tuple[str, int]]]:
    """(KDA layers, MLA layers): layer index -> (vLLM's layer name, KV cache group). Raises NotHybrid."""
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

    kda: dict[int, tuple[str, int]] = {}
    mla: dict[int, tuple[str, int]] = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        for name in group.layer_names:
            if isinstance(spec, MambaSpec):
                kda[layer_index(name)] = (name, number)
            elif isinstance(spec, AttentionSpec):
                mla[layer_index(name)] = (name, number)
            else:
                raise NotHybrid(
                    f"cache layer {name!r} is a {type(spec).__name__}; deltaserve moves KDA and MLA state"
                )
    if not kda or not mla:
        raise NotHybrid(
            f"the model has {len(kda)} recurrent and {len(mla)} attention layers; "
            "deltaserve serves hybrid KDA + MLA models (Kimi Linear, Kimi K3)"
        )
    return dict(sorted(kda.items())), dict(sorted(mla.items()))


def geometry_of(vllm_config: Any, kv_cache_config: Any, model_digest: str) -> Geometry:
    """The geometry of a running engine. Raises NotHybrid, or GeometryError naming the field."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    kda, mla = split_groups(kv_cache_config)
    groups = kv_cache_config.kv_cache_groups
    recurrent = groups[next(iter(kda.values()))[1]].kv_cache_spec
    attention = groups[next(iter(mla.values()))[1]].kv_cache_spec
    if len(recurrent.shapes) != 2 or len(recurrent.shapes[1]) != 3:
        raise NotHybrid(
            f"recurrent state of shapes {recurrent.shapes} is not KDA's (convolution, [heads, V, K])"
        )
    parallel = vllm_config.parallel_config
    heads, head_v, head_k = recurrent.shapes[1]
    dim_first = bool(is_conv_state_dim_first())
    columns = recurrent.shapes[0][1 if dim_first else 0]
    speculative = vllm_config.speculative_config
    num_spec = speculative.num_speculative_tokens if speculative is not None else 0
    return Geometry(
        model_digest=model_digest,
        quantisation=vllm_config.model_config.quantization or "none",
        kda_layers=tuple(kda),
        mla_layers=tuple(mla),
        num_heads=heads * parallel.tensor_parallel_size,
        head_k=head_k,
        head_v=head_v,
        conv_width=columns - num_spec + 1,
        conv_layout="DS" if dim_first else "SD",
        num_spec=num_spec,
        recurrent_dtype=_dtype(recurrent.dtypes[1]),
        conv_dtype=_dtype(recurrent.dtypes[0]),
        kv_cache_dtype=_dtype(attention.dtype),
        latent_width=attention.head_size,
        block_size=attention.block_size,
        page_bytes=attention.page_size_bytes,
        tp=parallel.tensor_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        interleave=parallel.cp_kv_cache_interleave_size,
    )


def _dtype(dtype: Any) -> str:
    name = str(dtype)
    if name not in _DTYPES:
        raise NotHybrid(
            f"state dtype {name} is unknown; supported: {', '.join(sorted(set(_DTYPES.values())))}"
        )
    return _DTYPES[name]
