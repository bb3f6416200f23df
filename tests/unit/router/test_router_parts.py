# SPDX-License-Identifier: Apache-2.0
"""The router's small parts: placement, traces, cooldown."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltaserve.config import RouterConfig
from router import main
from router.cooldown import FIRST_SECONDS, LONGEST_SECONDS, THRESHOLD, Cooldown
from router.http_protocol import _push
from router.placement import Facts, InvalidPlacement, local_reason, parse_override
from router.trace import Trace, TraceRing, response_id
from router.worker_link import begun


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (Facts(1, False, "handover"), "single_token"),
        (Facts(2, False, "handover"), None),
        (Facts(500, True, "handover"), "prompt_logprobs"),
        (Facts(500, False, "local"), "policy"),
        (Facts(2, False, "auto"), None),
    ],
)
def test_placement(facts: Facts, reason: str | None) -> None:
    assert local_reason(facts) == reason


@pytest.mark.parametrize("value", [None, {}])
def test_no_override(value: Any) -> None:
    assert parse_override(value) is None


def test_an_override() -> None:
    assert parse_override({"placement": "local"}) == "local"


@pytest.mark.parametrize(
    "value",
    [
        {"placement": "there"},
        {"placement": ["local"]},
        {"placement": None},
        {"boundary": "b"},
        {"placement": "local", "boundary": "b"},
        "local",
        [],
        7,
    ],
)
def test_an_invalid_override(value: Any) -> None:
    with pytest.raises(InvalidPlacement, match="kv_transfer_params"):
        parse_override(value)


@pytest.mark.parametrize(
    ("external", "response"),
    [
        ("cmpl-abc-0", "cmpl-abc"),
        ("cmpl-my-own-7-12", "cmpl-my-own-7"),
        ("chatcmpl-abc-7", "chatcmpl-abc-7"),
        ("resp_1", "resp_1"),
    ],
)
def test_response_ids(external: str, response: str) -> None:
    assert response_id(external) == response


def test_the_ring_forgets_the_oldest() -> None:
    ring = TraceRing(capacity=3)
    for name in ("cmpl-a", "chatcmpl-b", "cmpl-a", "cmpl-c"):
        ring.add(Trace(name, 5, "auto", 0.0))
    assert len(ring) == 3
    assert "parts" not in ring.find("cmpl-a")
    assert ring.find("b")["request_id"] == "chatcmpl-b"
    assert ring.find("c")["request_id"] == "cmpl-c"
    ring.add(Trace("cmpl-c", 9, "auto", 0.0))
    assert [part["prompt_tokens"] for part in ring.find("cmpl-c")["parts"]] == [5, 9]
    assert ring.find("b") is None
    assert ring.find("unknown") is None


def test_cooldown() -> None:
    now = 100.0
    cooldown = Cooldown(lambda: now)
    for _ in range(THRESHOLD - 1):
        cooldown.failed("w")
    assert cooldown.allows("w")
    cooldown.failed("w")
    assert not cooldown.allows("w")
    assert cooldown.allows("other")
    now += FIRST_SECONDS
    assert cooldown.allows("w")
    for _ in range(20):
        cooldown.failed("w")
    now += LONGEST_SECONDS - 0.01
    assert not cooldown.allows("w")
    cooldown.forget("w")
    assert cooldown.allows("w")


MODEL = Path(__file__).parents[3] / "models" / "demo"


class Served(Exception):
    """The router came to serve."""


@pytest.mark.parametrize("usable", [False, True])
def test_a_certificate_that_cannot_be_used_is_told_before_vllm_is_imported(
    usable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What imports vLLM cannot be imported here; the control, with nothing wrong, comes to serve."""

    def serve(*_: Any) -> None:
        raise Served

    for name in ("vllm", "router.worker_link", "router.core_client"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(main, "_configure_logging", lambda config: None)
    monkeypatch.setattr(main, "_serve", serve)
    missing = dict.fromkeys(("ca_cert", "cert", "key"), tmp_path / "gone.pem")
    config = RouterConfig.model_validate({"model": MODEL, "port": 0, "worker_tls": {} if usable else missing})
    if usable:
        with pytest.raises(Served):
            main.run(config)
        return
    assert main.run(config) == 1
    assert "worker_tls" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "written"),
    [
        ({}, b"3\r\nabc\r\n"),
        ({"disconnected": True}, b""),
        ({"response_started": False}, b""),
        ({"response_complete": True}, b""),
        ({"chunked_encoding": False}, b""),
        ({"flow": SimpleNamespace(write_paused=True)}, b""),
    ],
)
def test_a_chunk_is_pushed_only_into_an_answer_that_is_read(changed: dict[str, Any], written: bytes) -> None:
    found: list[bytes] = []
    state = {
        "flow": SimpleNamespace(write_paused=False),
        "transport": SimpleNamespace(write=found.append),
        "disconnected": False,
        "response_started": True,
        "response_complete": False,
        "chunked_encoding": True,
    }
    cycle: Any = SimpleNamespace(**{**state, **changed})
    assert _push(cycle, b"abc") == bool(written)
    assert b"".join(found) == written


# ---- a coroutine that begins at once


async def test_what_is_begun_runs_before_others_that_wait_for_their_turn() -> None:
    """The control: a task's first step comes after what was ready before it."""
    seen: list[str] = []

    async def work(name: str) -> None:
        seen.append(f"{name} begins")
        await asyncio.sleep(0.001)
        seen.append(f"{name} ends")

    tasks = [asyncio.ensure_future(work("task")), begun(work("begun"))]
    assert seen == ["begun begins"]
    await asyncio.gather(*tasks)
    assert seen[:2] == ["begun begins", "task begins"]
    assert sorted(seen[2:]) == ["begun ends", "task ends"]


async def test_how_a_begun_coroutine_ends() -> None:
    async def fail(wait: bool) -> None:
        if wait:
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
        raise KeyError("x")

    async def done() -> None:
        return

    cleaned: list[bool] = []

    async def patient() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    for wait in (False, True):
        with pytest.raises(KeyError):
            await begun(fail(wait))
    await begun(done())
    waiting = begun(patient())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert cleaned == [True]
