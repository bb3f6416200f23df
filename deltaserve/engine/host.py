# SPDX-License-Identifier: Apache-2.0
"""The engine core's host: one thread that owns vLLM's `EngineCore`, and a queue in front of it.

    other threads ──add / abort / call──▶ queue ──▶ engine thread: drain, step, emit ──▶ on_step(outputs)

The core runs in this process (with TP > 1 its executor starts one process a rank), so a worker costs one copy of vLLM's
Python. Everything that touches the core happens on its thread: OpenMP teams, and vLLM's own state, are bound to it.
`on_step` is called on the engine thread, once a step that produced something, `between_steps` before every step, with
the core; they must not block.

Private names of vLLM are used here: `EngineCore` and its `step_fn`, `post_step`, `preprocess_add_request`,
`batch_queue`, `scheduler`. `check_shape` refuses at start a vLLM in which they changed.
"""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from deltaserve.engine import partial_hits, resume

SUPPORTED_VLLM = ("0.32.0", "0.33.0")


class EngineFailed(RuntimeError):
    """The engine thread died; the worker cannot serve any more and must restart."""


def check_shape(core_class: Any) -> None:
    """Raise RuntimeError when vLLM's `EngineCore` no longer looks as this host expects."""
    wanted = ("step", "post_step", "preprocess_add_request", "add_request", "abort_requests", "shutdown")
    missing = [name for name in wanted if not callable(getattr(core_class, name, None))]
    parameters = list(inspect.signature(core_class.__init__).parameters)[1:4]
    if missing or parameters != ["vllm_config", "executor_class", "log_stats"]:
        raise RuntimeError(
            f"vllm's EngineCore changed (missing {missing}, parameters {parameters}); "
            f"deltaserve supports vLLM {' and '.join(SUPPORTED_VLLM)}: install one of them"
        )


class EngineHost:
    """Owns the engine thread. `start` blocks until the engine is ready or has failed."""

    def __init__(
        self,
        vllm_config: Any,
        on_step: Callable[[list[Any]], None],
        on_failure: Callable[[str], None],
        between_steps: Callable[[Any], None] = lambda core: None,
    ):
        self._vllm_config = vllm_config
        self._on_step = on_step
        self._on_failure = on_failure
        self._between_steps = between_steps
        self._inbox: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._core: Any = None
        self._compiling: set[str] = set()
        """Resumed requests whose grammar is being compiled; vLLM does not know them yet."""
        self._stopping = False

    def start(self, timeout: float) -> None:
        """Start the engine; raises what its construction raised, or TimeoutError after `timeout` seconds."""
        self._thread.start()
        self._ready.result(timeout)

    @property
    def core(self) -> Any:
        """vLLM's EngineCore. Read-only use from other threads, and only of what does not change while it runs."""
        return self._core

    def add(self, request: Any, on_error: Callable[[str], None], history: Sequence[int] = ()) -> None:
        """Queue an `EngineCoreRequest`; `on_error(reason)` is called on the engine thread when vLLM refuses it.

        `history`: tokens of its answer that exist already; its first output is the one after them.
        """

        def run(core: Any) -> None:
            try:
                if history:
                    vocab = self._vllm_config.model_config.get_vocab_size()
                    resume.attach(request, list(history), vocab)
                made, wave = core.preprocess_add_request(request)
                if resume.give_history(
                    core, made, lambda advance: self._inbox.put(late(made, wave, advance))
                ):
                    core.add_request(made, wave)
                else:
                    self._compiling.add(made.request_id)
            except Exception as error:
                on_error(f"{type(error).__name__}: {error}")

        def late(made: Any, wave: int, advance: Callable[[], None]) -> Callable[[Any], None]:
            def run(core: Any) -> None:
                if made.request_id not in self._compiling:
                    return  # aborted meanwhile
                self._compiling.discard(made.request_id)
                try:
                    advance()
                    core.add_request(made, wave)
                except Exception as error:
                    on_error(f"{type(error).__name__}: {error}")

            return run

        self._inbox.put(run)

    def abort(self, request_ids: list[str]) -> None:
        """Queue an abort; unknown ids are ignored by vLLM."""

        def run(core: Any) -> None:
            self._compiling.difference_update(request_ids)
            core.abort_requests(request_ids)

        self._inbox.put(run)

    def call(self, function: Callable[[Any], Any]) -> Future[Any]:
        """Run `function(core)` on the engine thread; the future carries its result or error."""
        future: Future[Any] = Future()

        def run(core: Any) -> None:
            try:
                future.set_result(function(core))
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def stop(self, timeout: float) -> bool:
        """Shut the engine down; False when it did not end within `timeout` seconds."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def warm_up(self, timeout: float) -> None:
        """Run two short requests, so that the first client does not pay for lazy imports and first-use set-up.

        Leaves nothing behind: the prefix cache is reset. Raises TimeoutError after `timeout` seconds.
        """
        self.call(_warm_up).result(timeout)

    def _run(self) -> None:
        try:
            from vllm.v1.engine.core import EngineCore
            from vllm.v1.executor import Executor

            check_shape(EngineCore)
            # Also where vLLM finds no entry points, as in a package that only lies on the path: answers depend on it.
            partial_hits.install()
            if self._vllm_config.device_config.device_type == "cuda":
                from deltaserve.engine.cuda import replay_ssm

                replay_ssm.install()
            core = EngineCore(
                self._vllm_config,
                Executor.get_class(self._vllm_config),
                False,
                executor_fail_callback=lambda: self._fail("a rank of the executor died"),
            )
            self._core = core
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            self._loop(core)
        except BaseException as error:
            if not self._stopping:
                self._fail(f"{type(error).__name__}: {error}")
                raise
        finally:
            core.shutdown()

    def _loop(self, core: Any) -> None:
        while True:
            busy = core.scheduler.has_requests() or bool(core.batch_queue)
            if not self._drain(core, block=not busy):
                return
            if not (core.scheduler.has_requests() or core.batch_queue):
                continue
            self._between_steps(core)
            outputs, executed = core.step_fn()
            produced = [batch for batch in (outputs or {}).values() if batch.outputs]
            if produced:
                self._on_step(produced)
            core.post_step(executed)
            if not executed:
                # Only transfers are pending: leave the processor to the threads that carry them.
                time.sleep(0.001)

    def _drain(self, core: Any, block: bool) -> bool:
        """Run what is queued; False when the host is stopping."""
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if item is None:
                return False
            item(core)
            block = False

    def _fail(self, reason: str) -> None:
        if not self._stopping:
            self._on_failure(reason)


def _warm_up(core: Any) -> None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    for number, params in enumerate(
        (
            SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, ignore_eos=True),
            SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, seed=0, ignore_eos=True),
        )
    ):
        request = EngineCoreRequest(
            request_id=f"warm-up-{number}",
            prompt_token_ids=[1 + i % 3 for i in range(20)],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(*core.preprocess_add_request(request))
    while core.scheduler.has_requests() or core.batch_queue:
        _, executed = core.step_fn()
        core.post_step(executed)
    core.reset_prefix_cache()
