# SPDX-License-Identifier: Apache-2.0
"""What ranks have done, told to the scheduler before it plans a step.

vLLM takes ranks' reports with a step's output: a load that ends while a step computes is heard of when that step, or
with steps scheduled ahead the one after it, has ended, and its request is in the step behind that. Where the only rank
lives in the engine's process its reports can be had between two steps. Failed loads take vLLM's own way, which puts
right what the scheduler has counted for them.

Private names of vLLM 0.32.0 and 0.33.0: `Scheduler._update_from_kv_xfer_finished`, by which it takes a step's reports.
"""

from __future__ import annotations

from typing import Any


def tell(core: Any) -> None:
    """Hand on what has ended since the last call; on the engine thread, between two steps.

    `core`: vLLM's EngineCore. Nothing happens where its ranks are processes of their own.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return
    received, reports = get_kv_transfer_group().ended_well()
    if received or reports is not None:
        from vllm.v1.outputs import KVConnectorOutput

        core.scheduler._update_from_kv_xfer_finished(
            KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=reports)
        )
