# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM constructs, once in the scheduler and once in every rank; it hands on to the half that fits.

Contract read from vLLM 0.32.0 and 0.33.0. Private names touched: `KVConnectorBase_V1._get_connector_metadata` and
`_vllm_config`, `_kv_cache_config` (set by the base class); in gate.py `Scheduler._update_from_kv_xfer_finished`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from statestore.connector.gate import Gate
from statestore.connector.messages import RankReports, StepMetadata
from statestore.connector.scheduler_half import SchedulerHalf
from statestore.connector.worker_half import WorkerHalf

if TYPE_CHECKING:
    import torch


class DeltaserveConnector(KVConnectorBase_V1, SupportsHMA):
    """Publishes and restores boundaries of hybrid models; see the halves for the protocol."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            parallel = vllm_config.parallel_config
            self._scheduler = SchedulerHalf(
                extra["worker_id"],
                parallel.world_size,
                parallel.decode_context_parallel_size,
                kv_cache_config.kv_cache_groups,
                vllm_config.speculative_config is not None,
            )
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, extra)

    # ---- scheduler half

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._sched.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._sched.added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._sched.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        # A boundary holds every group's state: all of them are written by the load, none needs zeroing.
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._sched.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state = getattr(scheduler_output, "kv_connector_block_state", None)
        offers = state.boundary_state_offloads if state is not None else None
        return self._sched.build_metadata(scheduler_output.num_scheduled_tokens, offers)

    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.kv_connector_worker_meta
        assert reports is None or isinstance(reports, RankReports)
        self._sched.collect(reports)
        self._sched.gate.hold(connector_output)

    @property
    def gate(self) -> Gate:
        """Of loads that began before their record was committed; for the engine thread."""
        return self._sched.gate

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._sched.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._sched.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._sched.pending

    # ---- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._rank.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # The one call that comes before the step's forward pass, in every step.
        self._rank.start_loads(self._step_metadata().load)
        self._rank.prepare_publishes(self._step_metadata().publish)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: vLLM calls it when the step has been launched, and a load that begins before reads meanwhile."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do layer by layer: a link is written when its step has ended."""

    def wait_for_save(self) -> None:
        self._rank.start_publishes(self._step_metadata().publish)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._rank.results()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._rank.take_reports()

    def ended_well(self) -> tuple[set[str], RankReports | None]:
        """See `WorkerHalf.ended_well`; ahead of the step that would tell of it (at_once.py)."""
        return self._rank.ended_well()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # ---- which half this is

    @property
    def _sched(self) -> SchedulerHalf:
        assert self._scheduler is not None, "this is a worker half"
        return self._scheduler

    @property
    def _rank(self) -> WorkerHalf:
        assert self._worker is not None, "this is a scheduler half"
        return self._worker

    def _step_metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata
