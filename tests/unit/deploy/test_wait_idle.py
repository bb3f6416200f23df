# SPDX-License-Identifier: Apache-2.0
"""A router pod waits for its requests before it stops, and not for ever."""

from __future__ import annotations

import http.server
import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.unit.deploy.rendering import CHART


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("wait_idle", CHART / "files" / "wait_idle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.POLL_SECONDS = 0.01
    return module


@contextmanager
def router(answers: list[tuple[int, Any]]) -> Iterator[tuple[str, list[str]]]:
    """A /health that gives one answer after the other, the last for ever."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, content = answers[min(len(asked), len(answers)) - 1]
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/health", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_it_waits_until_nothing_is_in_flight(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    busy = (200, {"in_flight": 2})
    without_workers = (
        503,
        {"in_flight": 1},
    )  # the last decode worker has gone, one request waits for another
    with router([busy, busy, without_workers, (200, {"in_flight": 0})]) as (url, asked):
        assert script.main(url, 0, 600) == 0
    assert asked == ["/health"] * 4
    assert capsys.readouterr().out == "idle\n"


def test_it_gives_up_after_the_longest_request(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with router([(200, {"in_flight": 3})]) as (url, asked):
        assert script.main(url, 0, 0.05) == 0
    assert asked
    assert "3 requests are still in flight" in capsys.readouterr().out


def test_a_router_that_is_gone_is_not_waited_for(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with router([(200, {})]) as (url, _):
        pass
    assert script.main(url, 0, 600) == 0
    assert capsys.readouterr().out == "idle\n"
