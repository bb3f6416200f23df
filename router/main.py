# SPDX-License-Identifier: Apache-2.0
"""The router's process.

Start: check the model folder ─▶ take the port ─▶ import vLLM ─▶ build the application ─▶ join ─▶ serve, and print
`READY http://host:port` on stdout. `STAGE ...` lines before it tell the supervisor where it is. It is ready without
workers: /health says what is missing. Whatever fails ends the process with one `error:` line and exit code 1.

Stop (SIGTERM, SIGINT): no new connections ─▶ requests in flight may finish for DRAIN_SECONDS, then end with an error
─▶ the workers' streams are closed. Within 5 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from deltaserve import etcd_channel, tls
from deltaserve.addresses import bracketed
from deltaserve.config import LogConfig, RouterConfig
from deltaserve.membership import Membership
from deltaserve.model_check import ModelError, read_facts
from deltaserve.telemetry import configure_logging, tracing
from router.admission.keys import KeysInvalid
from router.errors import CannotServe, Failed
from router.processes import start

if TYPE_CHECKING:
    from router.app import Front
    from router.processes.place import Place

log = logging.getLogger(__name__)

BACKLOG = 2048
DRAIN_SECONDS = 2.0
"""How long requests in flight may go on after the signal to stop."""
HTTP_SECONDS = 3
"""How long connections may take to end, the drain included."""
_STARTED_AS = os.getpid()
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model")


def run(config: RouterConfig, membership: Callable[[], Membership] | None = None) -> int:
    """Serve until a signal, and end the process; returns 1 when it did not come to serve.

    `membership` makes the register; None: etcd's.
    """
    _configure_logging(config.log)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the event loop takes it over
    try:
        _check_model(config)
        if config.processes > 1:
            start.check(config, _check_tls)
            listeners = start.listen(config, _listen)
        else:
            _check_tls(config)
            listeners = [_listen(config)]
    except (Failed, ModelError, KeysInvalid) as error:
        return _failed(str(error))
    try:
        _serve(config, membership or _etcd(config), listeners)
    except Failed as error:
        return _failed(str(error))
    finally:
        for listener in listeners:
            listener.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything has been given back. The interpreter's own end would take seconds, and compiled extensions complain.
    os._exit(0)


def _configure_logging(config: LogConfig) -> None:
    configure_logging("router", config)
    for name in (
        "vllm.triton_utils",
        "vllm.config",
        "vllm.platforms",
    ):  # advice about kernels, and there are none here
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _failed(message: str) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 1


def _stage(text: str) -> None:
    if os.getpid() != _STARTED_AS:
        return  # one of several processes; the parent says where they are
    print(f"STAGE {text}", flush=True)


def _etcd(config: RouterConfig) -> Callable[[], Membership]:
    def make() -> Membership:
        from deltaserve.etcd import EtcdMembership

        return EtcdMembership(config.etcd)

    return make


def _check_model(config: RouterConfig) -> None:
    """The router needs configuration and tokenizer of a hybrid model, no weights."""
    folder = config.model
    if not folder.is_dir():
        raise Failed(f"model {folder}: no such folder; give the folder of a hybrid Kimi model with --model")
    facts = read_facts(folder)
    if 0 < facts.max_position < config.max_model_len:
        raise Failed(
            f"max_model_len {config.max_model_len}: {folder} was made for {facts.max_position} tokens (config.json); "
            "lower it with --max-model-len"
        )
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise Failed(
            f"model {folder}: has no tokenizer ({' or '.join(TOKENIZERS)}); "
            "copy the tokenizer's files of the model into the folder"
        )


def _check_tls(config: RouterConfig) -> None:
    """The files of every kind of TLS can be read, and fit. Said before vLLM is imported, which takes seconds."""
    try:
        tls.channel_opener(config.worker_tls)
        etcd_channel.credentials(config.etcd)
    except ValueError as error:
        raise Failed(str(error)) from error
    if config.tls_cert is None or config.tls_key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # ssl's own errors among them
        reason = error.strerror or str(error)
        raise Failed(
            f"tls_cert {config.tls_cert}, tls_key {config.tls_key}: cannot be used ({reason}); "
            "give a certificate and its key as PEM files with --tls-cert and --tls-key"
        ) from error


def _listen(config: RouterConfig, shared: bool = False) -> socket.socket:
    """The endpoint's socket. `shared`: one of several on the port. Raises Failed."""
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Inherited by what is accepted. The second: what a client does not acknowledge for so long ends its connection,
        # also when all of an answer has been written and nobody waits for it any more.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * config.client_timeout)
        )
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise Failed(
            f"port {port}: {host}:{port} cannot be bound ({error.strerror}); free it, or choose another with --port"
        ) from error
    return listener


def _serve(
    config: RouterConfig, membership: Callable[[], Membership], listeners: list[socket.socket]
) -> None:
    _stage("importing vLLM")
    try:
        from router import core_client

        core_client.prepare()
        core_client.check_shapes()
        import uvloop

        from router.app import arguments

        _stage("reading the model's configuration")
        args = arguments(config)
        vllm_config = core_client.front_config(args)
    except KeyboardInterrupt:
        return
    except core_client.VllmChanged as error:
        raise Failed(str(error)) from error
    except (ValueError, OSError, ImportError) as error:
        text = " ".join(str(error).split())
        raise Failed(f"model {config.model}: {type(error).__name__}: {text}") from error
    if config.processes == 1:
        uvloop.run(_main(config, membership, listeners[0], args, vllm_config))
        return

    def child(place: Place, config: RouterConfig) -> int:
        try:
            uvloop.run(_main(config, membership, place.listener, args, vllm_config, place))
        except Failed as error:
            place.tell(f"error {error}")
            return 1
        return 0

    from router import gateway, worker_link  # noqa: F401  # read once, before the processes part

    start.serve(config, listeners, child, lambda: _announce(config, listeners[0]))


async def _main(
    config: RouterConfig,
    membership: Callable[[], Membership],
    listener: socket.socket,
    args: Any,
    vllm_config: Any,
    place: Place | None = None,
) -> None:
    from router.app import Front
    from router.dispatcher import Dispatcher
    from router.observe import Observed
    from router.worker_link import Dial

    tracing.configure(config.trace, "deltaserve.router")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    register = membership()
    dispatcher = Dispatcher(config, register)
    dispatcher.roster.dial = Dial.of(config)
    front = Front(dispatcher, args, vllm_config, place)
    _stage("joining the cluster")
    try:
        try:
            application = await front.open()
        except CannotServe as error:
            raise Failed(str(error)) from error
        _configure_logging(config.log)  # libraries of vLLM's have set levels of their own
        if not stop.is_set():
            await _http(Observed(application, front.dispatcher), listener, stop, front, place)
    finally:
        await asyncio.to_thread(tracing.shut_down)
        await front.close()
        await register.close()


def _make_server(application: Any, announce: Callable[[], None], config: RouterConfig) -> Any:
    import uvicorn

    from router.http_protocol import bounded

    class Server(uvicorn.Server):
        """Says when it serves, and leaves the signals to this process."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            announce()

        async def accept(self, listener: socket.socket) -> Callable[[], None]:
            """Serve a further listening socket; what is returned ends that, and leaves its connections."""
            config = self.config
            server = await asyncio.get_running_loop().create_server(
                lambda: config.http_protocol_class(  # type: ignore[call-arg]
                    config=config, server_state=self.server_state, app_state=self.lifespan.state
                ),
                sock=listener,
                ssl=config.ssl,
                backlog=BACKLOG,
            )
            self.servers.append(server)

            def end() -> None:
                self.servers.remove(server)
                server.close()

            return end

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(
        uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=HTTP_SECONDS,
            timeout_keep_alive=30,
            server_header=False,
            proxy_headers=False,  # nothing here asks where a client is
            http=bounded(config.client_timeout),
            ws="none",
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
    )


def _announce(config: RouterConfig, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.tls_cert is None else "https"
    print(f"READY {scheme}://{bracketed(host)}:{port}", flush=True)


async def _http(
    application: Any, listener: socket.socket, stop: asyncio.Event, front: Front, place: Place | None
) -> None:
    def announce() -> None:
        gc.collect()
        gc.freeze()
        if place is None:
            _announce(config, listener)
        else:
            assert front.gateway is not None
            place.follow(server.accept, front.gateway.door.pump)
            place.tell("ready")

    config = front.dispatcher.config
    server = _make_server(application, announce, config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopped = asyncio.create_task(stop.wait())
    failed = asyncio.create_task(front.failed())
    await asyncio.wait({serving, stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
    reason = failed.result() if failed.done() else ""
    stopped.cancel()
    failed.cancel()
    server.should_exit = True
    log.info("stopping; %d requests are in flight", front.dispatcher.in_flight)
    drain = asyncio.get_running_loop().call_later(
        DRAIN_SECONDS, front.dispatcher.end_all, "the router is stopping"
    )
    try:
        await serving
    finally:
        drain.cancel()
    if reason:
        raise Failed(reason)
