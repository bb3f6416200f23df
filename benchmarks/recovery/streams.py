# SPDX-License-Identifier: Apache-2.0
"""The streams that a worker is killed under: one of each kind that must go on exactly, read as a client does."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "port": {"type": "integer"}},
    "required": ["name", "port"],
}
TOOL = {
    "type": "function",
    "function": {"name": "note", "description": "Write a note down.", "parameters": SCHEMA},
}
TOOL_PARSER = "kimi_k2"
"""The router's, without which it takes no tools."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5, "ignore_eos": True},
    "schema": {"temperature": 0.8, "seed": 3, "structured_outputs": {"json": SCHEMA}},
    "chat": {"temperature": 0, "ignore_eos": True},
    "tools": {
        "temperature": 0.9,
        "seed": 5,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "note"}},
    },
}
CHATS = frozenset({"chat", "tools"})
"""Kinds that are chat completions; the others are completions of a prompt of token ids."""
SOON = 0.5
"""Seconds in which a killed worker's last chunks have come."""
SECONDS = 300.0
"""A stream without an event for so long has failed."""


@dataclass
class Stream:
    """One streamed request."""

    url: str
    body: dict[str, Any]
    name: str = ""
    """Its X-Request-Id; empty: the router names it."""
    text: str = ""
    """Text, and the arguments of tool calls."""
    tokens: list[int] = field(default_factory=list)
    """Token ids, where the body asks for them (`return_token_ids`)."""
    counted: int = 0
    """Tokens by the answer's own usage, where the body asks for it (`stream_options`)."""
    id: str = ""
    ends: list[str] = field(default_factory=list)
    """Finish reasons and [DONE], in their order."""
    gap: float = 0.0
    """Longest time between two chunks, seconds."""
    times: list[float] = field(default_factory=list)
    """When its chunks came; the monotonic clock's seconds."""
    chunks: int = 0
    error: str = ""

    @property
    def outcome(self) -> tuple[str, list[int], int, list[str], str]:
        """What must be the same with and without a kill."""
        return self.text, self.tokens, self.counted, self.ends, self.error

    def gap_at(self, moment: float) -> float:
        """Longest time between two chunks, of those that were under way at the moment or began soon after it."""
        return max(
            (
                after - before
                for before, after in pairwise(self.times)
                if before <= moment + SOON and after >= moment
            ),
            default=0.0,
        )

    def start(self) -> threading.Thread:
        """Read it in a thread."""
        thread = threading.Thread(target=self._read, daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        headers = {"Content-Type": "application/json"}
        if self.name:
            headers["X-Request-Id"] = self.name
        request = urllib.request.Request(self.url, json.dumps(self.body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                last = 0.0
                for line in reply:
                    if not line.startswith(b"data: "):
                        continue
                    now = time.monotonic()
                    if last and self.chunks > 1:
                        self.gap = max(self.gap, now - last)
                    last = now
                    self.times.append(now)
                    self._take(line.removeprefix(b"data: ").strip())
        except OSError as error:
            self.error = self.error or f"{type(error).__name__}: {error}"

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.ends.append("[DONE]")
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"])
            return
        self.chunks += 1
        self.id = event["id"]
        self.counted = (event.get("usage") or {}).get("completion_tokens", self.counted)
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            self.text += choice.get("text") or delta.get("content") or ""
            self.tokens += choice.get("token_ids") or ()
            for call in delta.get("tool_calls") or ():
                self.text += (call.get("function") or {}).get("arguments") or ""
            if choice.get("finish_reason"):
                self.ends.append(choice["finish_reason"])


def streams(
    endpoint: str, model: str, prompt: Sequence[int], tokens: int, **fields: Any
) -> dict[str, Stream]:
    """One of each kind, not started; `fields` go into every body."""
    made = {}
    for kind, own in KINDS.items():
        body = {"model": model, "max_tokens": tokens, "stream": True, **own, **fields}
        if kind in CHATS:
            body["messages"] = [{"role": "user", "content": "My port is 4711. Tell me everything you know."}]
        else:
            body["prompt"] = list(prompt)
        path = "/v1/chat/completions" if kind in CHATS else "/v1/completions"
        made[kind] = Stream(endpoint + path, body)
    return made


def finish(threads: Sequence[threading.Thread], seconds: float = SECONDS) -> None:
    """Wait until all have ended. Raises TimeoutError."""
    limit = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
        if thread.is_alive():
            raise TimeoutError("a stream hangs")


def started(running: dict[str, Stream], chunks: int, seconds: float = 120.0) -> None:
    """Wait until every stream has had so many chunks, or has ended. Raises TimeoutError."""
    limit = time.monotonic() + seconds
    while any(stream.chunks < chunks and not stream.ends and not stream.error for stream in running.values()):
        if time.monotonic() > limit:
            raise TimeoutError("the streams do not begin")
        time.sleep(0.02)


def differences(running: dict[str, Stream], expected: dict[str, Stream]) -> dict[str, str]:
    """The streams that are not as they must be, with what they are instead."""
    return {
        kind: stream.error
        or f"{stream.ends} {stream.counted} tokens {stream.text[-60:]!r} for {expected[kind].text[-60:]!r}"
        for kind, stream in running.items()
        if stream.outcome != expected[kind].outcome
    }


def fetch(endpoint: str, path: str) -> dict[str, Any]:
    """A JSON document of the router; empty while it has none."""
    try:
        with urllib.request.urlopen(endpoint + path, timeout=10) as reply:
            found: dict[str, Any] = json.load(reply)
            return found
    except OSError:
        return {}
