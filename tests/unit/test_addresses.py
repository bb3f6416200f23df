# SPDX-License-Identifier: Apache-2.0
"""An IPv6 address goes into brackets wherever a port follows, and is used where it was written so."""

from __future__ import annotations

import socket

import grpc
import pytest

from deltaserve.addresses import bracketed, join
from deltaserve.config import WorkerConfig
from deltaserve.engine.service import WorkerService
from deltaserve.engine.worker import _serve


def test_only_ipv6_gets_brackets() -> None:
    assert join("::1", 80) == "[::1]:80"
    assert join("[::1]", 80) == "[::1]:80"
    assert join("127.0.0.1", 80) == "127.0.0.1:80"
    assert bracketed("node-1") == "node-1"


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", id="ipv6")])
async def test_a_worker_serves_and_names_its_address(host: str) -> None:
    if ":" in host and not _has_ipv6():
        pytest.skip("no IPv6 on this machine")
    server, address = await _serve(WorkerConfig(host=host), WorkerService())
    try:
        assert address.rpartition(":")[0] == bracketed(host)
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
    finally:
        await server.stop(None)
