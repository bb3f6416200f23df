# SPDX-License-Identifier: Apache-2.0
"""vLLM's serving layer over this cluster: the one file of the router that touches vLLM's private names.

vLLM's `AsyncLLM` renders, validates, tokenizes and detokenizes, and gets its engine core from
`EngineCoreClient.make_async_mp_client`. The name `EngineCoreClient` in `vllm.v1.engine.async_llm` is used for that
single call, so replacing the name there puts a `RemoteCore` in the place of the core: it looks local, and hands every
request to the dispatcher.

A request's failure is an output with FinishReason.ERROR. An exception out of `get_output_async` would end every
request of the process, so it never raises.

The router needs a VllmConfig, and no device: `front_config` builds one on a platform that changes nothing, because
vLLM's CPU platform switches prefix caching off for latent attention and then refuses a hybrid model for it.

Written for vLLM 0.32.0 and 0.33.0; `check_shapes` refuses at start what no longer looks like them.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from router.errors import error_body

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

    from router.faces.switch import Core

SUPPORTED_VLLM = ("0.32.0", "0.33.0")

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",  # whatever the wheel was built for, this process computes nothing
    "VLLM_PLUGINS": "",  # the kernels' plugin belongs into workers
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "VLLM_MAX_N_SEQUENCES": "128",  # as OpenAI's; vLLM's own 16,384 lets one request take the cluster
    "CUDA_VISIBLE_DEVICES": "",
}
"""What must be in the environment before vLLM is imported."""


class VllmChanged(RuntimeError):
    """This vLLM does not look as this file expects; the message says where, and which versions do."""


def prepare() -> None:
    """Set the environment and install the platform. Must run before anything else imports vLLM's configuration."""
    os.environ.update(ENVIRONMENT)
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    if not hasattr(platforms, "_current_platform"):
        raise VllmChanged(_changed("vllm.platforms has no _current_platform"))

    class FrontPlatform(CpuPlatform):
        """A CPU that nothing is computed on: it leaves the configuration as it is."""

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            return

    platforms._current_platform = FrontPlatform()


def _changed(what: str) -> str:
    import vllm

    return (
        f"vllm {vllm.__version__}: {what}; the router supports vLLM {' and '.join(SUPPORTED_VLLM)}: "
        "install one of them"
    )


def check_shapes() -> None:
    """Raise VllmChanged when what this file replaces or imitates is not as it was."""
    import vllm.v1.engine.async_llm as async_llm
    from vllm.v1.engine.core_client import EngineCoreClient

    if getattr(async_llm, "EngineCoreClient", None) is None:
        raise VllmChanged(_changed("vllm.v1.engine.async_llm has no EngineCoreClient"))
    uses = inspect.getsource(async_llm).count("EngineCoreClient.")
    if uses != 1:
        raise VllmChanged(_changed(f"vllm.v1.engine.async_llm uses EngineCoreClient {uses} times, not once"))
    wanted = [
        "vllm_config",
        "executor_class",
        "log_stats",
        "client_addresses",
        "client_count",
        "client_index",
        "renderer",
    ]
    found = list(inspect.signature(EngineCoreClient.make_async_mp_client).parameters)
    if found != wanted:
        raise VllmChanged(_changed(f"make_async_mp_client takes {found}, not {wanted}"))
    missing = [
        name
        for name in _REMOTE_METHODS
        if not callable(getattr(EngineCoreClient, name, None))
        or not callable(getattr(RemoteCore, name, None))
    ]
    if missing:
        raise VllmChanged(_changed(f"EngineCoreClient lacks {missing}"))


_REMOTE_METHODS = (
    "get_supported_tasks_async",
    "reset_mm_cache_async",
    "add_request_async",
    "abort_requests_async",
    "get_output_async",
    "shutdown",
)


class RemoteCore:
    """Stands where AsyncLLM expects its engine core's client."""

    def __init__(self, dispatcher: Core) -> None:
        self._dispatcher = dispatcher
        self.resources = SimpleNamespace(engine_dead=False)  # AsyncLLM.errored
        self.engine_ranks_managed = [0]  # its stat loggers
        self.output_handler: Callable[[], asyncio.Task[None] | None] = lambda: None
        """AsyncLLM's task that detokenizes; set once AsyncLLM exists."""

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        return

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        from vllm.exceptions import QueueOverflowError

        from router.dispatcher import Overloaded

        if request.abort_immediately:  # a clean-up message of vLLM's own handoff, which is not in use here
            return
        try:
            self._dispatcher.add(request)
        except Overloaded as error:
            raise QueueOverflowError() from error

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        # The detokenizer aborts what a stop string has completed; everybody else, what its client has left.
        stopped = asyncio.current_task() is self.output_handler()
        self._dispatcher.abort(request_ids, stopped)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._dispatcher.outputs()

    def shutdown(self, timeout: float | None = None) -> None:
        """The dispatcher's owner closes it."""

    def get_kv_event_sources(self) -> dict[str, Any]:
        return {}


def front_config(args: Namespace) -> Any:
    """A VllmConfig for rendering, validation and detokenization. Raises ValueError as vLLM does."""
    from vllm import AsyncEngineArgs
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig

    engine_args = AsyncEngineArgs.from_cli_args(args)
    model_config = engine_args.create_model_config()
    model_config.quantization = None  # the weights' affair: nothing is loaded here
    return VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(enable_prefix_caching=True),
        device_config=DeviceConfig(device="cpu"),
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )


def make_async_llm(vllm_config: Any, dispatcher: Core) -> Any:
    """vLLM's AsyncLLM over the dispatcher, with vLLM's Prometheus metrics. Needs a running event loop."""
    import vllm.v1.engine.async_llm as async_llm
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    core = RemoteCore(dispatcher)

    def make_core(*args: Any, renderer: Any = None, **kwargs: Any) -> RemoteCore:
        if renderer is not None:
            renderer.start_mm_warmup_in_background()
        return core

    original = async_llm.EngineCoreClient
    async_llm.EngineCoreClient = SimpleNamespace(make_async_mp_client=make_core)
    try:
        llm = async_llm.AsyncLLM(
            vllm_config,
            executor_class=None,
            log_stats=False,
            log_requests=False,
            stat_loggers=[PrometheusStatLogger],
        )
    finally:
        async_llm.EngineCoreClient = original
    core.output_handler = lambda: llm.output_handler
    return llm


def serve_args(argv: list[str]) -> Namespace:
    """vLLM's own server arguments, parsed and validated. Raises ValueError or SystemExit as vLLM does."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    except ImportError:  # 0.33.0
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(args)
    return args


async def _http_error(request: Any, error: Any) -> Any:
    """The framework's errors in OpenAI's shape."""
    from starlette.responses import JSONResponse

    return JSONResponse(
        error_body(error.status_code, str(error.detail)), error.status_code, headers=error.headers
    )


def _describe_what_is_served(app: Any) -> None:
    """Keep out of /openapi.json what the gateway does not let through."""
    from router.gateway import serves

    whole = app.openapi

    def openapi() -> dict[str, Any]:
        schema: dict[str, Any] = whole()
        paths = {path: operations for path, operations in schema["paths"].items() if serves(path)}
        return {**schema, "paths": paths}

    app.openapi = openapi


async def make_app(llm: Any, args: Namespace) -> Any:
    """vLLM's FastAPI application over `llm`."""
    from starlette.exceptions import HTTPException
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.envs import enable_envs_cache

    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    app.add_exception_handler(HTTPException, _http_error)  # vLLM's own handler sees only FastAPI's subclass
    app.middleware_stack = (
        app.build_middleware_stack()
    )  # it has been built already, with the handlers before this one
    _describe_what_is_served(app)
    await init_app_state(llm, app.state, args, tasks)
    enable_envs_cache()  # reading os.environ again and again takes a fifth of the time of a stream
    return app
