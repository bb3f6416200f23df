# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's CPU model runner tells ReplaySSM what happens to its requests.

Two methods of the runner say all of it: the batch of a step is formed (who runs, who is gone), and its tokens have been
accepted. Moves between blocks come through the state copies, windows through the layers.

What folds is ``decode_worker.replay_ssm.engine_steps``, which this package names and loads where it is wanted: the
arrows between packages point the other way.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deltaserve.engine.cpu import replay
from deltaserve.engine.cpu import vllm_internals as internals
from deltaserve.engine.cpu.layer_caches import LayerCaches

_STEPS = "deltaserve_replay_steps"


def make_steps(
    groups: list[tuple[dict[str, Any], Tensor]], *, max_requests: int, window: int, dtype: torch.dtype
) -> Any:
    """``ReplaySteps`` for groups of (vLLM's layers by name, block table); ``dtype`` is the model's."""
    steps, records = (
        import_module(f"decode_worker.replay_ssm.{name}") for name in ("engine_steps", "records")
    )

    def made(layer: Any) -> Any:
        caches = LayerCaches(layer)
        heads, value_dim, key_dim = caches.recurrent.shape[1:]
        kept = records.WindowRecords.allocate(
            2 * max_requests, heads, key_dim, value_dim, window, dtype=dtype, device="cpu"
        )
        return steps.ReplayLayer(caches.recurrent, caches.conv, caches.weight, **caches.gate, records=kept)

    return steps.ReplaySteps(
        [
            steps.ReplayGroup({name: made(layer) for name, layer in layers.items()}, table)
            for layers, table in groups
        ],
        max_requests=max_requests,
        window=window,
    )


def _steps_of(runner: Any) -> Any:
    """The steps of a model runner, made at its first step, when its caches exist."""
    if not hasattr(runner, _STEPS):
        steps = None
        if replay.wanted(runner.vllm_config):
            known = runner.compilation_config.static_forward_context
            kinds = (internals.KimiK3DeltaAttention, internals.KimiGatedDeltaNetAttention)
            groups = []
            for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
                layers = {name: known[name] for name in group.layer_names if isinstance(known[name], kinds)}
                if layers:
                    table = runner.input_batch.block_table[gid].get_device_tensor(runner.max_num_reqs)
                    groups.append((layers, table))
            steps = make_steps(
                groups,
                max_requests=runner.max_num_reqs,
                window=runner.vllm_config.num_speculative_tokens + 1,
                dtype=runner.model_config.dtype,
            )
        setattr(runner, _STEPS, steps)
    return getattr(runner, _STEPS)


def install(runner: Any = internals.CPUModelRunner) -> None:
    """Teach vLLM's CPU model runner to tell of the requests of a step, and of the tokens that it accepted."""
    update, executed = runner._update_states, runner._update_states_after_model_execute
    if getattr(update, "tells_replay", False):
        return

    @functools.wraps(update)
    def _update_states(self: Any, scheduler_output: Any) -> Any:
        result = update(self, scheduler_output)
        steps = _steps_of(self)
        replay.activate(steps)
        if steps is not None:
            gone = set(scheduler_output.finished_req_ids)
            gone |= scheduler_output.preempted_req_ids or set()
            gone |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
            steps.begin(self.input_batch.req_ids, gone)
        return result

    @functools.wraps(executed)
    def _update_states_after_model_execute(
        self: Any, output_token_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        result = executed(self, output_token_ids, *args, **kwargs)
        if (steps := replay.active()) is not None:
            steps.accept((output_token_ids != -1).sum(dim=1).tolist())
        return result

    _update_states.tells_replay = True  # type: ignore[attr-defined]
    internals.replace(runner, "_update_states", _update_states)
    internals.replace(runner, "_update_states_after_model_execute", _update_states_after_model_execute)
