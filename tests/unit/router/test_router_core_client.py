# SPDX-License-Identifier: Apache-2.0
"""The seam to vLLM: its shape is checked at start, and a core's errors stay with their request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.v1.engine.async_llm as async_llm
from vllm.exceptions import QueueOverflowError
from vllm.v1.engine.core_client import EngineCoreClient

from router.core_client import RemoteCore, VllmChanged, check_shapes
from router.dispatcher import Overloaded


def test_this_vllm_fits() -> None:
    check_shapes()


def test_a_seam_that_has_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(async_llm, "EngineCoreClient")
    with pytest.raises(VllmChanged, match=r"no EngineCoreClient.*0\.32\.0 and 0\.33\.0"):
        check_shapes()


def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCoreClient, "make_async_mp_client", staticmethod(lambda vllm_config: None))
    with pytest.raises(VllmChanged, match="make_async_mp_client"):
        check_shapes()


def test_a_lost_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(EngineCoreClient, "get_output_async")
    with pytest.raises(VllmChanged, match="get_output_async"):
        check_shapes()


class Recorder:
    """A dispatcher that refuses, and remembers aborts."""

    def __init__(self) -> None:
        self.aborts: list[tuple[list[str], bool]] = []

    def add(self, request: Any) -> None:
        raise Overloaded("full")

    def abort(self, request_ids: Any, stopped: bool) -> None:
        self.aborts.append((list(request_ids), stopped))


async def test_an_overload_is_an_http_503() -> None:
    core = RemoteCore(Recorder())  # type: ignore[arg-type]
    with pytest.raises(QueueOverflowError) as caught:
        await core.add_request_async(SimpleNamespace(abort_immediately=False))  # type: ignore[arg-type]
    assert caught.value.http_status == 503
    await core.add_request_async(SimpleNamespace(abort_immediately=True))  # type: ignore[arg-type]


async def test_a_stop_string_is_told_from_a_client_that_left() -> None:
    recorder = Recorder()
    core = RemoteCore(recorder)  # type: ignore[arg-type]
    handler = asyncio.create_task(core.abort_requests_async(["a"]))
    core.output_handler = lambda: handler
    await handler
    await core.abort_requests_async(["b"])
    assert recorder.aborts == [(["a"], True), (["b"], False)]
