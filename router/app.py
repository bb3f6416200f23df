# SPDX-License-Identifier: Apache-2.0
"""The OpenAI server: vLLM's own application over the dispatcher, behind the gateway.

vLLM gives chat completions, completions, responses, messages, models, tokenize and detokenize, with templates, stop
strings, log-probs, tools and reasoning. What is added or refused before it is in gateway.py.
"""

from __future__ import annotations

import asyncio
import socket
from argparse import Namespace
from typing import Any

import grpc
from starlette.types import ASGIApp as App

from deltaserve import text_form
from deltaserve.config import RouterConfig
from router import core_client
from router.dispatcher import Dispatcher
from router.errors import CannotServe
from router.faces.grpc_api import GrpcServer
from router.faces.lean import LeanApp
from router.faces.rust_front import BACKLOG, RustFront, find
from router.faces.rust_relay import RustRelay
from router.faces.switch import Switch
from router.gateway import Gateway
from router.processes.place import Place
from router.processes.siblings import Siblings


def arguments(config: RouterConfig) -> Namespace:
    """vLLM's server arguments for this router."""
    name = config.model_name
    optional = []
    published = text_form.is_published(config.model)
    if published and config.chat_template is None and not text_form.has_chat_template(config.model):
        optional.append("--tokenizer-mode=kimi_k3")  # as vLLM chooses by the published architecture
    if config.tool_parser:
        optional += ["--enable-auto-tool-choice", f"--tool-call-parser={config.tool_parser}"]
    if config.reasoning_parser:
        optional.append(f"--reasoning-parser={config.reasoning_parser}")
    if config.chat_template is not None:
        optional.append(f"--chat-template={config.chat_template.resolve()}")
    args = core_client.serve_args(
        [
            f"--model={config.model.resolve()}",
            f"--served-model-name={name}",
            f"--max-model-len={config.max_model_len}",
            "--disable-log-stats",
            "--disable-uvicorn-access-log",
            "--enable-prompt-tokens-details",
            *optional,
        ]
    )
    if published:
        args.hf_overrides = text_form.text_alone
    return args


class Front:
    """The application and what is behind it. `open` and `close` frame its life, on the event loop that serves it."""

    def __init__(
        self, dispatcher: Dispatcher, args: Namespace, vllm_config: Any, place: Place | None = None
    ) -> None:
        """`place`: among several processes."""
        self.dispatcher = dispatcher
        self._place = place
        self.siblings: Siblings | None = None
        self._args = args
        self._vllm_config = vllm_config
        self._llm: Any = None
        self.switch = Switch(dispatcher)
        self.rust: RustFront | None = None
        self.grpc: GrpcServer | None = None
        self.gateway: Gateway | None = None

    async def open(self) -> Gateway:
        """Build the application and start the dispatcher."""
        self.dispatcher.start()
        self._llm = core_client.make_async_llm(self._vllm_config, self.switch)
        lean = LeanApp(await core_client.make_app(self._llm, self._args), self._llm, self.switch)
        await lean.prepare()
        config = self.dispatcher.config
        name = config.model_name
        app: App = lean
        if config.front == "rust":
            self.rust = RustFront(
                find(config.rust_binary),
                self.switch,
                model=config.model.resolve(),
                name=name,
                max_model_len=config.max_model_len,
                listener=self._rust_listener(),
            )
            self.rust.start()
            app = RustRelay(lean, self.rust)
        place = self._place
        if place is not None:
            self.siblings = Siblings(place.index, place.processes, place.folder)
            await self.siblings.start()
        gateway = self.gateway = Gateway(app, self.dispatcher, place, self.siblings)
        if config.grpc_port >= 0:
            self.grpc = GrpcServer(
                gateway,
                name,
                lambda: bool(self.dispatcher.roster.ready("decode")),
                shared=place is not None,
            )
            try:
                await self.grpc.start(config.host, config.grpc_port, _credentials(config))
            except OSError as error:
                raise CannotServe(
                    f"grpc_port {config.grpc_port}: {error}; choose another with --grpc-port"
                ) from error
            if place is None:
                print(f"GRPC {config.host}:{self.grpc.port}", flush=True)
        return gateway

    def _rust_listener(self) -> socket.socket | None:
        """The Rust front end's own port, where it has one; several processes share their parent's."""
        config, place = self.dispatcher.config, self._place
        if not config.rust_port:
            return None
        return rust_listener(config.host, config.rust_port) if place is None else place.rust_listener

    async def failed(self) -> str:
        """Return why nothing can be answered any more, once that is so: vLLM's detokenizing task has ended."""
        task = self._llm.output_handler
        await asyncio.wait({task})
        return "vLLM's output handler ended; its error is above"

    async def close(self) -> None:
        """End what is in flight and let the workers go. Never raises."""
        if self.grpc is not None:
            await self.grpc.close()
        if self.rust is not None:
            await self.rust.close()
        if self.siblings is not None:
            await self.siblings.close()
        await self.dispatcher.close()
        if self._llm is not None:
            self._llm.shutdown()


def rust_listener(host: str, port: int) -> socket.socket:
    """The Rust front end's own port. Raises CannotServe."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotServe(
            f"rust_port {port}: {host}:{port} cannot be bound ({error.strerror}); choose another with --rust-port"
        ) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _credentials(config: RouterConfig) -> Any:
    """The gRPC port's certificate, where the endpoint has one."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    pair = (config.tls_key.read_bytes(), config.tls_cert.read_bytes())
    return grpc.ssl_server_credentials((pair,))
