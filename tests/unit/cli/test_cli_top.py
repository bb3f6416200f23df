# SPDX-License-Identifier: Apache-2.0
"""The picture that `deltaserve top` draws, on a terminal of 80 columns."""

from __future__ import annotations

import io
from typing import Any

import pytest

from deltaserve.cli import top

WORKER = {
    "id": "prefill-d714521a83",
    "state": "ready",
    "running": 3,
    "slots": 8,
    "waiting": 11,
    "queued_tokens": 40_960,
    "outstanding_tokens": 65_536,
    "kv_usage": 0.123,
    "state_bytes": 123_456_789,
    "error": "",
}
LATENCY = {"p50": 0.1, "p90": 0.2, "p99": None}
STATE: dict[str, Any] = {
    "status": "ok",
    "model": "demo",
    "placement": "auto",
    "policy": "least",
    "uptime": 19.0,
    "time": 0.0,
    "requests": {
        "in_flight": 1,
        "queued": 2,
        "tokens_per_second": 3.0,
        "requests_per_second": 0.2,
        "ended": {"finished": 3, "error": 0},
        "resumed": 0,
    },
    "latency": {"ttft": LATENCY, "tpot": LATENCY},
    "missing": [],
    "pools": {"prefill": [WORKER], "decode": [{**WORKER, "id": "decode-9c31edd3b7", "state": "draining"}]},
    "boundaries": [],
    "choices": {"short_prompt": 1},
    "recent": [
        {
            "id": "chatcmpl-cb325d199e044b199505523693794b4b",
            "prompt": 16_000,
            "output": 347,
            "choice": "local",
            "reason": "short_prompt",
            "why": "8 tokens are fewer than 256, and here are more words than fit into any column",
            "ttft": 0.094,
            "tpot": 0.047,
            "status": "finished",
            "failure": "",
        }
    ],
    "faults": [],
}


def test_numbers_and_states_are_whole_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["ready", "draining", "3/8", "11", "40960", "65536", "12.3 %", "16000", "347", "94 ms", "47 ms"]
    assert [word for word in wanted if word not in drawn(80)] == []
    monkeypatch.setattr(top, "GIVE_WAY", {})  # the control: what the columns would be without it
    assert [word for word in wanted if word not in drawn(80)] != []


def test_an_error_of_a_worker_has_a_column_when_there_is_one() -> None:
    assert "error" not in drawn(160).partition("Pools")[2]
    broken = {**STATE, "pools": {"prefill": [], "decode": [{**WORKER, "error": "no answer"}]}}
    assert "no answer" in drawn(160, broken)


def drawn(width: int, state: dict[str, Any] = STATE) -> str:
    stream = io.StringIO()
    top.draw(state, "", stream, width)
    assert max(map(len, stream.getvalue().splitlines())) <= width
    return stream.getvalue()
