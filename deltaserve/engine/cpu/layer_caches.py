# SPDX-License-Identifier: Apache-2.0
"""What the kernels read of one of vLLM's KDA layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deltaserve.engine.cpu.vllm_internals import is_conv_state_dim_first


class LayerCaches:
    """A layer's two state tensors: raw convolution columns [slots, C, W-1+num_spec], recurrent [slots, H, V, K]."""

    def __init__(self, layer: Any) -> None:
        conv, self.recurrent = layer.kv_cache
        self.conv: Tensor = conv if is_conv_state_dim_first() else conv.transpose(-1, -2)
        self.weight: Tensor = layer.conv1d.weight.view(
            layer.conv1d.weight.size(0), layer.conv1d.weight.size(2)
        )
        self.gate = {"a_log": layer.A_log, "dt_bias": layer.dt_bias, "lower_bound": layer.gate_lower_bound}
        self.heads: int = layer.local_num_heads
        self.head_dim: int = layer.head_dim
