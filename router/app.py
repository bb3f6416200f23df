# SPDX-License-Identifier: Apache-2.0
"""The OpenAI server: vLLM's own application over the dispatcher, behind the gateway.

vLLM gives chat completions, completions, responses, messages, models, tokenize and detokenize, with templates, stop
strings, log-probs, tools and reasoning. What is added or refused before it is in gateway.py.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from deltaserve.config import RouterConfig
from router import core_client
from router.dispatcher import Dispatcher
from router.faces.lean import LeanApp
from router.faces.switch import Switch
from router.gateway import Gateway


def arguments(config: RouterConfig) -> Namespace:
    """vLLM's server arguments for this router."""
    name = config.served_model_name or config.model.resolve().name
    optional = []
    if config.tool_parser:
        optional += ["--enable-auto-tool-choice", f"--tool-call-parser={config.tool_parser}"]
    if config.reasoning_parser:
        optional.append(f"--reasoning-parser={config.reasoning_parser}")
    if config.chat_template is not None:
        optional.append(f"--chat-template={config.chat_template.resolve()}")
    return core_client.serve_args(
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


class Front:
    """The application and what is behind it. `open` and `close` frame its life, on the event loop that serves it."""

    def __init__(self, dispatcher: Dispatcher, args: Namespace, vllm_config: Any) -> None:
        self.dispatcher = dispatcher
        self._args = args
        self._vllm_config = vllm_config
        self._llm: Any = None
        self.switch = Switch(dispatcher)

    async def open(self) -> Gateway:
        """Build the application and start the dispatcher."""
        self.dispatcher.start()
        self._llm = core_client.make_async_llm(self._vllm_config, self.switch)
        app = LeanApp(await core_client.make_app(self._llm, self._args), self._llm, self.switch)
        await app.prepare()
        return Gateway(app, self.dispatcher)

    async def failed(self) -> str:
        """Return why nothing can be answered any more, once that is so: vLLM's detokenizing task has ended."""
        task = self._llm.output_handler
        await asyncio.wait({task})
        return "vLLM's output handler ended; its error is above"

    async def close(self) -> None:
        """End what is in flight and let the workers go. Never raises."""
        await self.dispatcher.close()
        if self._llm is not None:
            self._llm.shutdown()
