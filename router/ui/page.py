# SPDX-License-Identifier: Apache-2.0
"""The routes of the status page.

    GET /ui             the page; it holds nothing of the cluster, so it needs no API key
    GET /ui/style.css, /ui/app.js
    GET /ui/state       the state as JSON (state.py); needs an API key where the router has any

Plain files, no build step, nothing from elsewhere: the content security policy allows this origin alone.
"""

from __future__ import annotations

import json
from pathlib import Path

from starlette.types import Send

from router.dispatcher import Dispatcher
from router.errors import error_body
from router.processes.siblings import Siblings
from router.ui.state import Snapshots

STATIC = Path(__file__).with_name("static")
_FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/": ("index.html", "text/html; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
    "/ui/app.js": ("app.js", "text/javascript; charset=utf-8"),
}
STATE = "/ui/state"
_SAFE = (
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-cache"),
)


class StatusPage:
    """See the module's description. Answers everything under /ui."""

    def __init__(self, dispatcher: Dispatcher, siblings: Siblings | None = None) -> None:
        self._snapshots = Snapshots(dispatcher)
        self._siblings = siblings
        if siblings is not None:
            siblings.answers["state"] = lambda _: self._snapshots.part()
        self._files = {path: ((STATIC / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}

    @staticmethod
    def serves(path: str) -> bool:
        """Whether a path is the page's."""
        return path == "/ui" or path.startswith("/ui/")

    async def __call__(self, send: Send, method: str, path: str, allowed: bool) -> None:
        """Answer. `allowed`: the client has shown a key that opens something, or none is needed."""
        if method not in ("GET", "HEAD"):
            await _error(send, 405, f"{path} takes GET")
        elif path in self._files:
            body, kind = self._files[path]
            await _send(send, 200, body, kind, empty=method == "HEAD")
        elif path != STATE:
            await _error(send, 404, f"there is no {path} here; /ui is the status page")
        elif not allowed:
            await _error(send, 401, "the state needs an API key: send it as `Authorization: Bearer KEY`")
        else:
            others = await self._siblings.ask("state") if self._siblings is not None else []
            body = json.dumps(self._snapshots.now(others)).encode()
            await _send(send, 200, body, "application/json", empty=method == "HEAD")


async def _error(send: Send, status: int, words: str) -> None:
    await _send(send, status, json.dumps(error_body(status, words, None)).encode(), "application/json")


async def _send(send: Send, status: int, body: bytes, kind: str, empty: bool = False) -> None:
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        *_SAFE,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if empty else body})
