# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own cache manager offers in a step that takes a state on its way: its block, and its tokens."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.request import Request

from statestore.connector.inside import Offer, last_inside

BLOCK, UNIT = 128, 16
STATES = [0, 1]


def stepped(length: int, checkpoints: int = 1) -> tuple[list[Offer], tuple[list[int], ...]]:
    """Offers and block tables of a step that computes a whole prompt, two groups of states and one of rows."""
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    kda = MambaSpec(
        block_size=BLOCK,
        shapes=((3, 24), (2, 4, 4)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=1 << 16,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=checkpoints,
        prefill_checkpoint_alignment=UNIT if checkpoints else None,
    )
    mla = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=128, dtype=torch.float32, page_size_padded=1 << 16
    )
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate((kda, kda, mla))]
    config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = KVCacheManager(config, 4096, BLOCK, UNIT)
    fields: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": list(range(3, 3 + length)),
        "sampling_params": SamplingParams(max_tokens=1),
        "pooling_params": None,
        "block_hasher": get_request_block_hasher(UNIT, function),
    }
    known = inspect.signature(Request.__init__).parameters
    request = Request(**{name: value for name, value in fields.items() if name in known})
    manager.new_step_starts()
    assert manager.allocate_slots(request, length) is not None
    return manager.take_boundary_state_offloads().get("r", []), manager.get_block_ids("r")


@pytest.mark.parametrize(
    ("length", "checkpoint"),
    [(129, 128), (200, 192), (640, 624), (641, 640), (699, 688), (700, 688), (705, 704)],
)
def test_the_state_inside_a_pass_is_offered_by_name(length: int, checkpoint: int) -> None:
    offers, tables = stepped(length)
    inside = last_inside(offers, STATES, tables, 0, length)
    assert inside is not None
    assert inside.length == checkpoint
    slot = -(-length // BLOCK) - 2
    assert inside.blocks == {group: tables[group][slot] for group in STATES}
    # Its place would say another number of tokens, but where the checkpoint ends a block.
    assert (checkpoint == (slot + 1) * BLOCK) == (checkpoint % BLOCK == 0)


@pytest.mark.parametrize("length", [1, 16, 17, 127, 128])
def test_a_prompt_in_one_block_is_offered_none(length: int) -> None:
    offers, tables = stepped(length)
    assert last_inside(offers, STATES, tables, 0, length) is None


def test_a_kernel_that_takes_none_is_offered_none() -> None:
    """Control."""
    offers, tables = stepped(699, checkpoints=0)
    assert last_inside(offers, STATES, tables, 0, 699) is None
