# SPDX-License-Identifier: Apache-2.0
"""Chromium without a window, over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import tempfile
from collections.abc import AsyncIterator
from typing import Any
from urllib.request import urlopen

from websockets.asyncio.client import ClientConnection, connect

SECONDS = 120.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-port=0",
)


class Page:
    """One page of the browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        """Exceptions, errors on the console, and what the content security policy refused."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._numbers)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        async with asyncio.timeout(SECONDS):
            while True:
                message = json.loads(await self._socket.recv())
                self._note(message)
                if message.get("id") == number:
                    assert "error" not in message, message
                    return dict(message["result"])

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}")

    async def go(self, url: str, width: int = 1366, height: int = 768) -> None:
        """Open an address in a window of a laptop's size."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int) -> None:
        """Give the window a size."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value; while the page loads, it may fail."""
        expression = f"(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()"
        async with asyncio.timeout(SECONDS):
            while True:
                value = await self.run(expression)
                if value:
                    return value
                await asyncio.sleep(0.05)

    async def text(self, selector: str) -> str:
        """What can be read in an element."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def screenshot(self) -> bytes:
        """The whole page as PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        picture = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        return base64.b64decode(picture["data"])


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A browser with one empty page; it and its profile go at the end."""
    with tempfile.TemporaryDirectory() as profile:
        process = await asyncio.create_subprocess_exec(
            "chromium",
            *_FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        drain = None
        try:
            async with asyncio.timeout(SECONDS):
                line = b""
                while b"DevTools listening on " not in line:
                    line = await process.stderr.readline()
                    assert line or process.returncode is None, "chromium ended"
            drain = asyncio.create_task(process.stderr.read())
            host = line.decode().split("ws://")[1].split("/")[0]
            pages = await asyncio.to_thread(_pages, host)
            target = next(page for page in pages if page["type"] == "page")
            async with connect(target["webSocketDebuggerUrl"], max_size=64 << 20, proxy=None) as socket:
                yield Page(socket)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()
            if drain is not None:
                await drain


def _pages(host: str) -> list[dict[str, Any]]:
    with urlopen(f"http://{host}/json/list", timeout=SECONDS) as reply:
        return list(json.load(reply))
