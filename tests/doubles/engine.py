# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: vLLM's own scheduler and cache manager, this project's own connector on every rank, and
the toy model in place of the weights.

What is real: `Scheduler`, `KVCacheManager` (align mode, prefix cache, null blocks, pins), `KVOutputAggregator`, both
connector halves with their threads, one worker half a rank. What is not: the model, the devices, and the processes of
the ranks; what the scheduler hands to a rank is pickled on the way, as between processes. It offers what a
worker's service wants of `deltaserve.engine.host.EngineHost`.

A test stops it with `hold`, lets it go with `go`, and sees every step in `on_schedule` and `on_computed`.
"""

from __future__ import annotations

import copy
import functools
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

from deltaserve.config import StoreConfig, WorkerConfig
from deltaserve.engine.arguments import connector_config, engine_args
from statestore.pool import Pool
from tests.doubles.pool import DeadlinePool, Store
from tests.doubles.rank_memory import AllRanks, Tables, caches_config
from tests.doubles.toy_model import State, ToyModel
from tests.support.cluster import DEMO

MODEL_DIGEST = "0123456789abcdef"
MATCH_UNIT = 16
CHECKPOINT_ALIGNMENT = 16


@functools.lru_cache
def _base_config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    config = WorkerConfig(model=DEMO, max_model_len=4096)
    args = engine_args(config, connector_config(config, "base", MODEL_DIGEST))
    return EngineArgs(**args).create_engine_config()


def _vllm_config(config: WorkerConfig, worker_id: str, block_size: int, blocks: int) -> Any:
    made = copy.deepcopy(_base_config())
    transfer = connector_config(config, worker_id, MODEL_DIGEST)
    made.kv_transfer_config.kv_role = transfer["kv_role"]
    made.kv_transfer_config.kv_connector_extra_config = transfer["kv_connector_extra_config"]
    made.parallel_config.tensor_parallel_size = config.tp
    made.parallel_config.world_size = config.tp
    made.parallel_config.decode_context_parallel_size = config.dcp
    made.parallel_config.cp_kv_cache_interleave_size = config.dcp_interleave
    made.scheduler_config.max_num_batched_tokens = config.max_num_batched_tokens
    made.scheduler_config.max_num_seqs = config.max_num_seqs
    made.cache_config.block_size = made.cache_config.mamba_block_size = block_size
    made.cache_config.num_gpu_blocks = blocks
    made.cache_config.prefix_match_unit = MATCH_UNIT
    return made


def _pool_double(store: Store, config: StoreConfig) -> Pool:
    return DeadlinePool(store, config.segment_bytes, timeout=config.timeout)


class _NoGrammar:
    """Structured output for requests that have none."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **keywords: True


class EngineDouble:
    """See the module's description. Blocks are `block_size` tokens of one rank."""

    def __init__(
        self,
        config: WorkerConfig,
        worker_id: str,
        store: Store,
        *,
        model: ToyModel | None = None,
        block_size: int = 32,
        blocks: int = 96,
        checkpoints: bool = False,
        make_pool: Callable[[StoreConfig], Pool] | None = None,
        on_step: Callable[[list[Any]], None] = lambda batches: None,
    ) -> None:
        """`checkpoints`: the model takes a state inside a pass where vLLM asks for one, as FlashKDA does."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler

        self.model = model or ToyModel()
        self.tp, self.dcp, self.interleave = config.tp, config.dcp, config.dcp_interleave
        self.block_size = block_size
        self.on_step = on_step
        self.on_schedule: Callable[[Any], None] = lambda scheduled: None
        """Called with every SchedulerOutput before anything is computed; may block."""
        self.on_computed: Callable[[Any], None] = lambda scheduled: None
        """Called when the step has been computed, before the connector's part of it."""
        self.vllm_config = _vllm_config(config, worker_id, block_size, blocks)
        per_rank = self.model.heads // self.tp
        self._all = AllRanks(self.tp, self.dcp, self.interleave, per_rank, block_size, blocks)
        self._alignment = CHECKPOINT_ALIGNMENT if checkpoints else None
        self.kv_cache_config = caches_config(per_rank, block_size, blocks, self._all.page, self._alignment)
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(self.kv_cache_config, self.vllm_config)
        hash_function = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hash_block, hash_function)
        self.scheduler = Scheduler(
            self.vllm_config, self.kv_cache_config, _NoGrammar(), scheduler_block, hash_block
        )
        self.memory = self._all.ranks
        self.pools: list[Any] = []
        """Of the ranks, in order: `DeadlinePool`s over `store`, or what `make_pool` made."""
        self._make_pool = make_pool or functools.partial(_pool_double, store)
        self.connectors = [self._rank_connector(rank) for rank in range(self.tp)]
        self._state_at: dict[str, int] = {}
        self._aggregator = self._new_aggregator()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._allowed: int | None = None
        """Steps that may still be made; None: any number."""
        self._block_ids = self.scheduler.kv_cache_manager.get_block_ids
        self.steps = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine {worker_id}", daemon=True)
        self._thread.start()

    # ---- what the service wants

    @property
    def core(self) -> EngineDouble:
        return self

    def add(
        self, request: Any, on_error: Callable[[str], None] = lambda reason: None, history: Sequence[int] = ()
    ) -> None:
        """Queue an EngineCoreRequest; it cannot begin with a history here."""
        assert not history, "the double resumes nothing"
        from vllm.v1.request import Request

        def run() -> None:
            try:
                self.scheduler.add_request(Request.from_engine_core_request(request, self._hasher))
            except Exception as error:
                on_error(f"{type(error).__name__}: {error}")

        self._inbox.put(run)

    def abort(self, request_ids: list[str]) -> None:
        """Queue an abort."""
        from vllm.v1.request import RequestStatus

        self._inbox.put(
            lambda: self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED) and None
        )

    def call(self, function: Callable[[EngineDouble], Any]) -> Future[Any]:
        """Run `function(self)` on the engine thread, between two steps."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(self))
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def hold(self, after: int = 0) -> None:
        """Make `after` further steps and then none until `go`; additions and aborts are still taken."""
        self._allowed = after

    def go(self) -> None:
        """Make steps again."""
        self._allowed = None

    def stop(self) -> None:
        """End the thread and the connectors."""
        self._inbox.put(None)
        self._thread.join(30)
        for connector in self.connectors:
            connector.shutdown()

    # ---- what a test looks at

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def tables(self, request_id: str) -> Tables:
        """The request's block tables, as the cache manager holds them now."""
        return tuple(list(table) for table in self._block_ids(request_id))

    def read_state(self, tables: Tables, length: int) -> State:
        """The state after `length` tokens, put together from all ranks; replicas of a row must agree."""
        recurrent, conv = self._all.states(tables, -(-length // self.block_size) - 1)
        return State(recurrent, conv, self._all.rows(tables, length))

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._drain():
                if self._allowed == 0 or not self.scheduler.has_requests():
                    continue
                computed = self._step()
                if self._allowed and computed:
                    self._allowed -= 1
                if not computed:
                    time.sleep(0.001)
        except BaseException as error:
            self.failure = error
            raise

    def _drain(self) -> bool:
        idle = self._allowed == 0 or not self.scheduler.has_requests()
        try:
            while True:
                item = self._inbox.get(timeout=0.005) if idle else self._inbox.get_nowait()
                if item is None:
                    return False
                item()
                idle = False
        except queue.Empty:
            return True

    def _step(self) -> bool:
        """One engine step; whether anything was computed."""
        scheduled = self.scheduler.schedule()
        self.on_schedule(scheduled)
        tokens = self._execute(scheduled)
        self.on_computed(scheduled)
        outputs = self._transfer(scheduled, tokens)
        produced = [
            batch for batch in self.scheduler.update_from_output(scheduled, outputs).values() if batch.outputs
        ]
        self.steps += 1
        if produced:
            self.on_step(produced)
        return bool(scheduled.total_num_scheduled_tokens)

    # ---- the model's part of a step

    def _execute(self, scheduled: Any) -> dict[str, list[int]]:
        for request_id in scheduled.finished_req_ids:
            self._state_at.pop(request_id, None)
        for copied in scheduled.kv_cache_block_copies or ():
            for memory in self.memory:
                memory.copy_block(copied.src_block_id, copied.dst_block_id)
        sampled = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            # schedule() has counted this step's tokens already.
            start = request.num_computed_tokens - count
            sampled[request_id] = self._compute(request, start, count)
        return sampled

    def _compute(self, request: Any, start: int, count: int) -> list[int]:
        tables = self.tables(request.request_id)
        end = start + count
        before = self._state_at.get(request.request_id, (start - 1) // self.block_size)
        after = -(-end // self.block_size) - 1
        if start == 0:
            empty = self.model.empty()
            recurrent, conv = empty.recurrent, empty.conv
        else:
            recurrent, conv = self._all.states(tables, before)
        ids = list(request.all_token_ids)[start:end]
        inside, column = self._checkpoint(start, end)
        if inside:
            self._all.write_states(tables, column, *self.model.advance(recurrent, conv, ids[:inside])[:2])
        recurrent, conv, rows = self.model.advance(recurrent, conv, ids)
        self._state_at[request.request_id] = after
        self._all.write_states(tables, after, recurrent, conv)
        self._all.write_rows(tables, start, rows)
        if end < request.num_tokens:
            return []
        return [self.model.next_token(State(recurrent, conv, self._all.rows(tables, end)))]

    def _checkpoint(self, start: int, end: int) -> tuple[int, int]:
        """Where a pass takes a state on its way, by vLLM's rule: tokens after its start, slot in the table; (0, -1)."""
        from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

        (inside,), (column,) = compute_mamba_prefill_checkpoints(
            [end],
            [end - start],
            hash_block_size=MATCH_UNIT,
            mamba_block_size=self.block_size,
            checkpoint_alignment=self._alignment,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=MATCH_UNIT,
        )
        return inside, column

    # ---- the connector's part of a step

    def _transfer(self, scheduled: Any, tokens: dict[str, list[int]]) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        names = list(tokens)
        packed = pickle.dumps(scheduled.kv_connector_metadata)
        outputs = []
        for connector in self.connectors:
            connector.bind_connector_metadata(pickle.loads(packed))
            connector.start_load_kv(None)
            connector.wait_for_save()
            results = connector.get_transfer_results(scheduled.finished_req_ids)
            output = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
            outputs.append(
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=[tokens[name] for name in names],
                    kv_connector_output=output,
                )
            )
        return self._aggregator.aggregate(outputs)

    def _new_aggregator(self) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        return KVOutputAggregator.from_connector(self.scheduler.get_kv_connector(), self.tp)

    def _rank_connector(self, rank: int) -> Any:
        """A worker half of one rank, whose pool is given and which believes that it is that rank."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from statestore.connector import DeltaserveConnector

        def pool(config: StoreConfig, **options: Any) -> Pool:
            made = self._make_pool(config)
            self.pools.append(made)
            return made

        connector = DeltaserveConnector(self.vllm_config, KVConnectorRole.WORKER, self.kv_cache_config)
        with (
            mock.patch("statestore.mooncake_pool.MooncakePool", pool),
            mock.patch("vllm.distributed.parallel_state.get_tensor_model_parallel_rank", return_value=rank),
        ):
            connector.register_kv_caches(self.memory[rank].caches())
        return connector
