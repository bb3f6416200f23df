# SPDX-License-Identifier: Apache-2.0
"""A worker's process: engine, gRPC server, membership, in the order in which they depend on each other.

Start: check the model ─▶ engine (minutes on large models) ─▶ gRPC server ─▶ register ─▶ `READY address` on stdout.
`STAGE ...` lines tell the supervisor where it is. Whatever fails ends the process with one `error:` line, exit code 1.

Stop (SIGTERM, SIGINT, or an order to drain): finish what is held, for at most `drain_seconds` (drain.py; a second
signal cuts it short) ─▶ leave the register ─▶ end the streams, whose jobs are aborted and whose boundaries are released
─▶ stop the engine. All after the drain within `STOP_SECONDS`; what still hangs then is left to the operating system,
because a worker that does not end blocks its port. An engine that fails ends the process the same way, without a drain
and with exit code 1.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from deltaserve import etcd_channel
from deltaserve.addresses import join
from deltaserve.config import WorkerConfig
from deltaserve.engine import probes
from deltaserve.engine.arguments import connector_config, engine_args, resolved_dtype, set_environment
from deltaserve.engine.digest import model_digest
from deltaserve.engine.drain import finish
from deltaserve.engine.host import EngineHost
from deltaserve.engine.plugin_check import require_plugins
from deltaserve.engine.probes import Health
from deltaserve.engine.role import Job, Role
from deltaserve.membership import Member, Membership
from deltaserve.model_check import require_servable
from deltaserve.telemetry import configure_logging, tracing
from deltaserve.telemetry.logs import hand_to_vllm
from deltaserve.tls import server_credentials
from deltaserve.wire import worker_pb2 as pb

if TYPE_CHECKING:
    from deltaserve.engine.service import WorkerService

log = logging.getLogger(__name__)

START_SECONDS = 1800.0
STOP_SECONDS = 4.0
SWITCH_SECONDS = 0.0005
"""After which a thread that computes in Python makes way for another. Python's 5 ms are as long as a decode step on a
GPU, and the engine's thread shares the interpreter with streams and copies."""


@dataclass
class Parts:
    """What a role is made of; the role's package supplies them, so that this one imports no other."""

    connector_events: Callable[[str, Callable[..., None] | None], None]
    """`listen(worker_id, listener)`: hear the connector's scheduler half."""
    geometry: Callable[[Any, Any, str], Any]
    """`geometry(vllm_config, kv_cache_config, model_digest)`: the engine's cache."""
    segments: Callable[[Any], list[str]]
    """`segments(engine core)`: the Mooncake segment of every rank."""
    between_steps: Callable[[Any], None]
    """`between_steps(engine core)`: what is to be known before a step is planned; on the engine thread, every time."""
    membership: Callable[[WorkerConfig], Membership]
    build: Callable[[str, Any, Callable[[Job], None]], Any]
    """`await build(worker_id, geometry, forget)`: the role."""


class StartFailed(Exception):
    """A start that failed for a reason that the operator can act on."""


def run(config: WorkerConfig, parts: Parts) -> int:
    """Run a worker until a signal or a failure; returns the exit code."""
    configure_logging(config.role, config.log)
    if config.log.format == "json":
        hand_to_vllm(config.role)
    set_environment(config)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        require_servable(config.model)
        require_plugins()
        server_credentials(config.tls)
        etcd_channel.credentials(config.etcd)
        stage("importing vLLM")
        return asyncio.run(_main(config, parts))
    except (StartFailed, FileNotFoundError, ValueError, ConnectionError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


def stage(text: str) -> None:
    """Tell the supervisor what this process is doing."""
    print(f"STAGE {text}", flush=True)


async def _main(config: WorkerConfig, parts: Parts) -> NoReturn:
    # Imported here because it imports vLLM, which must find the environment set.
    from deltaserve.engine.service import WorkerService

    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()
    outcome = {"code": 0}

    def failed(reason: str) -> None:
        log.critical("the engine failed: %s", reason)
        outcome["code"] = 1
        loop.call_soon_threadsafe(hurry.set)
        loop.call_soon_threadsafe(stop.set)

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    worker_id = f"{config.role}-{uuid.uuid4().hex[:10]}"
    digest = model_digest(config.model, resolved_dtype(config))
    service = WorkerService()
    parts.connector_events(worker_id, service.on_event)
    starting = asyncio.ensure_future(_start_engine(config, parts, worker_id, digest, service, failed))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        os._exit(0)  # asked to stop while loading: nothing is registered, nothing to give back
    host = starting.result()
    configure_logging(config.role, config.log)  # vLLM has set levels of its own
    kv_cache_config = host.core.scheduler.kv_cache_config
    geometry = parts.geometry(host.core.vllm_config, kv_cache_config, digest)
    segments = await asyncio.wrap_future(host.call(parts.segments))
    role: Role = await parts.build(worker_id, geometry, service.forget)
    service.attach(host, role, _description(config, worker_id, digest, geometry, segments, host))
    server, address = await _serve(config, service)
    health = Health(loop)
    if config.metrics_port:
        try:
            probes.serve(config.host, config.metrics_port, health)
        except OSError as error:
            raise StartFailed(
                f"metrics_port: {config.host}:{config.metrics_port} cannot be bound ({error.strerror}); choose another "
                "with --metrics-port, or 0 for none"
            ) from error
    # After the ranks: a process must not be forked beside the exporter's threads.
    tracing.configure(config.trace, f"deltaserve.{config.role}", worker_id)
    stage("joining the cluster")
    membership = parts.membership(config)
    member = Member(
        worker_id,
        config.role,
        config.advertise or address,
        digest,
        geometry.fingerprint(),
        0,
        cache=geometry.to_json(),
    )
    membership.on_lease = role.on_lease
    joined = await membership.join(member)
    await role.on_lease(joined.lease)
    health.ready = True
    print(f"READY {address}", flush=True)
    ordered = asyncio.ensure_future(membership.drain_order())
    await asyncio.wait({stopped, ordered}, return_when=asyncio.FIRST_COMPLETED)
    seconds = config.drain_seconds
    if ordered.done() and (order := ordered.result()).seconds is not None:
        seconds = order.seconds
    stop.set()  # so that a signal from now on hurries
    ordered.cancel()
    health.ready = False
    stage("draining")
    moved = await finish(membership, joined, service, lambda: role.unread(segments), seconds, hurry)
    await membership.drained(moved)
    await _shutdown(service, server, membership, host, role, outcome["code"])


async def _start_engine(
    config: WorkerConfig,
    parts: Parts,
    worker_id: str,
    digest: str,
    service: WorkerService,
    failed: Callable[[str], None],
) -> EngineHost:
    stage("reading the model's configuration")
    began = time.monotonic()

    def start() -> EngineHost:
        from vllm.engine.arg_utils import AsyncEngineArgs

        args = engine_args(config, connector_config(config, worker_id, digest))
        vllm_config = AsyncEngineArgs(**args).create_engine_config()
        stage("loading the model")
        host = EngineHost(vllm_config, service.on_step, failed, parts.between_steps)
        host.start(START_SECONDS)
        stage("warming up")
        host.warm_up(START_SECONDS)
        return host

    try:
        host = await asyncio.to_thread(start)
    except Exception as error:
        log.exception("the engine did not start")
        raise StartFailed(_explain(error, config)) from error
    log.info("engine ready after %.1f s", time.monotonic() - began)
    return host


def _explain(error: Exception, config: WorkerConfig) -> str:
    """The operator's view of an engine that did not start."""
    text = f"{type(error).__name__}: {error}"
    lowered = text.lower()
    if "kv cache" in lowered and ("memory" in lowered or "blocks" in lowered or "larger" in lowered):
        return (
            f"no memory for the KV cache: {error} Raise --kv-cache-bytes (now {config.kv_cache_bytes}) "
            f"or lower --max-model-len (now {config.max_model_len})"
        )
    if isinstance(error, MemoryError) or "out of memory" in lowered or "can't allocate memory" in lowered:
        return f"out of memory while starting: {error}. Lower --kv-cache-bytes (now {config.kv_cache_bytes})"
    return f"the engine did not start: {text}"


def _description(
    config: WorkerConfig, worker_id: str, digest: str, geometry: Any, segments: list[str], host: EngineHost
) -> pb.WorkerDescription:
    import vllm

    from deltaserve.doctor.capabilities import report_json

    vllm_config = host.core.vllm_config
    blocks = vllm_config.cache_config.num_gpu_blocks or 0
    return pb.WorkerDescription(
        worker_id=worker_id,
        role=config.role,
        model_digest=digest,
        max_model_len=vllm_config.model_config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        geometry=geometry.to_json(),
        state_bytes=geometry.sizes.kda_rank * geometry.tp,
        token_bytes=geometry.sizes.mla_token,
        segment=",".join(segments),
        vllm_version=vllm.__version__,
        dcp=geometry.dcp,
        interleave=geometry.interleave,
        kv_cache_tokens=blocks * geometry.block_size * geometry.dcp,
        capabilities=report_json(vllm_config),
        reasoning_parser=config.reasoning_parser,
        bundles=True,
        early=config.role == "decode",
    )


async def _serve(config: WorkerConfig, service: WorkerService) -> tuple[Any, str]:
    import grpc

    from deltaserve.wire.codec import SERVER_OPTIONS
    from deltaserve.wire.worker_pb2_grpc import add_WorkerServicer_to_server

    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(service, server)
    address = join(config.host, config.port)
    credentials = server_credentials(config.tls)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        port = 0
        cause: Exception | None = error
    else:
        cause = None
    if port == 0:
        raise StartFailed(
            f"port: {address} cannot be bound; is it taken? Choose another with --port, or 0"
        ) from cause
    await server.start()
    return server, join(config.host, port)


async def _shutdown(
    service: WorkerService, server: Any, membership: Membership, host: EngineHost, role: Role, code: int
) -> NoReturn:
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await membership.leave()
            await service.close()
            await role.close()
            await server.stop(0.5)
            await membership.close()
            await asyncio.to_thread(tracing.shut_down)
            if not await asyncio.to_thread(host.stop, 2.0):
                log.warning("the engine did not end in time")
    except TimeoutError:
        log.warning(
            "shutdown took longer than %.0f s; leaving the rest to the operating system", STOP_SECONDS
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # Mooncake's and OpenMP's threads may not end by themselves; everything that others rely on has been given back.
    os._exit(code)
